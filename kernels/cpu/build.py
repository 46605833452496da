"""Compile the C sources of this folder with the machine's own compiler, once.

The library is kept in the user's cache directory. Its name is a hash of the sources, the compiler
and the processor. A hash of its content is appended to it, because loading a truncated library can
kill the process. Without a compiler, `library` says so, and torch computes. This module does not
import torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
FLAG_SETS = (
    ("-march=native", "-fopenmp"),
    ("-march=native", "-fopenmp-simd"),
    ("-march=native", "-Wno-unknown-pragmas"),
    ("-Wno-unknown-pragmas",),
)
"""With threads, with `omp simd` only, and as plain C. The first set that the compiler accepts is
used. Clang's threads are not: its OpenMP library and torch's do not work in one process."""
TIMEOUT = 120.0  # seconds for the compiler
_ANSWER = 5.0  # seconds for an empty file; a compiler that takes longer hangs
EXPIRES = 30 * 86400.0  # seconds; when a library is made, older ones than this are removed
OFF = "MINIKV_NATIVE"
"""Environment variable: if it is 0, no library is compiled or loaded."""


@cache
def library() -> tuple[ctypes.CDLL | None, str]:
    """(the library, "") or (None, why there is none). The first call compiles it if necessary."""
    if switched_off():
        return None, f"{OFF} is 0"
    compiler = find()
    if compiler is None:
        return None, "there is no C compiler (cc, gcc or clang)"
    try:
        folder = store()
        path = None if folder is None else folder / f"{key(compiler)}.so"
        if path is not None and _usable(path):
            with contextlib.suppress(OSError):  # a library that cannot be loaded is compiled again
                return ctypes.CDLL(str(path)), ""
        if folder is not None and not os.access(folder, os.W_OK):
            folder = path = None
        with tempfile.TemporaryDirectory(dir=folder) as made:
            found = Path(made, "native.so")
            why = _compile(compiler, found)
            if why:
                return None, why
            if path is not None:
                with found.open("ab") as file:
                    file.write(_digest(found.read_bytes()))
                found.chmod(0o700)  # for any umask: see `_ours`
                os.replace(found, path)
                _forget(path)
            return ctypes.CDLL(str(path or found)), ""
    except OSError as error:
        return None, f"the compiled kernels cannot be kept or loaded: {error.strerror or error}"


def compiles() -> bool:
    """Whether the next call of `library` will compile, which takes seconds."""
    compiler = find()
    if switched_off() or compiler is None or library.cache_info().currsize:
        return False
    try:
        folder = store()
        return folder is None or not _usable(folder / f"{key(compiler)}.so")
    except OSError:
        return False


def unusable() -> Path | None:
    """The library that was kept, if there is one, and it cannot be used and will be replaced."""
    compiler = find()
    if switched_off() or compiler is None or library.cache_info().currsize:
        return None
    try:
        folder = store()
        path = None if folder is None else folder / f"{key(compiler)}.so"
        if path is None or not os.path.lexists(path) or path.is_dir() or _usable(path):
            return None
        return path
    except OSError:
        return None


def switched_off() -> bool:
    """Whether the user switched the library off: see `OFF`."""
    return os.environ.get(OFF) == "0"


def find() -> str | None:
    """The path of the compiler: $CC if that is a program, or the first of `COMPILERS`; or None."""
    for name in (os.environ.get("CC", ""), *COMPILERS):
        found = shutil.which(name) if name else None
        if found is not None:
            return found
    return None


def store() -> Path | None:
    """The folder of libraries, minikv/kernels under $XDG_CACHE_HOME or ~/.cache; made if necessary.

    None if it cannot be made, or if other users may write to it: they could put code there.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not base and os.environ.get("HOME") == "":
        return None  # Path.home() would be the root directory
    try:
        root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
        folder = root / "minikv" / "kernels"
        root.mkdir(parents=True, exist_ok=True)
        for made in (folder.parent, folder):
            made.mkdir(mode=0o700, exist_ok=True)
        return folder if _ours(folder.parent) and _ours(folder) else None
    except (OSError, RuntimeError):
        return None


def sources() -> list[Path]:
    """The C files, in a fixed order."""
    return sorted(FOLDER.glob("*.c"))


def key(compiler: str) -> str:
    """The name of the library's file: a hash of everything that the library depends on."""
    found = hashlib.sha256()
    for path in (*sources(), *sorted(FOLDER.glob("*.h"))):
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    about = os.stat(compiler)
    for fact in (compiler, about.st_size, about.st_mtime_ns, FLAGS, FLAG_SETS, _processor()):
        found.update(repr(fact).encode())
    return found.hexdigest()[:24]


def _processor() -> str:
    """What -march=native depends on: machines that share a home directory may differ in it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return platform.platform() + platform.processor()
    names = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU part")
    return "\n".join(line for line in lines if line.partition(":")[0].strip() in names)


def _compile(compiler: str, target: Path) -> str:
    """Compile all files to `target`, in parallel. Returns why that failed, or ""."""
    clang = _is_clang(compiler)
    if clang is None:
        return f"{Path(compiler).name} does not answer"
    said = ""
    for flags in FLAG_SETS[1:] if clang else FLAG_SETS:
        with ThreadPoolExecutor() as pool:
            commands = [
                [compiler, *FLAGS, *flags, "-c", str(path), "-o", str(target.with_name(path.stem))]
                for path in sources()
            ]
            made = [command[-1] for command in commands]
            found = [*pool.map(_run, commands)]
        if not any(found):
            found = [_run([compiler, *FLAGS, *flags, "-shared", *made, "-o", str(target), "-lm"])]
        if not any(found):
            return ""
        said = said or next(filter(None, found))
        if any(why.startswith(_ENDED) for why in found):
            break  # other flags would not help, or would make a slower library
    return f"{Path(compiler).name} failed: {said}"


_ENDED = "it ended with "


def _run(command: list[str]) -> str:
    """Run the compiler. Returns the first line of its errors, or ""."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{_ENDED}{type(error).__name__}"
    if done.returncode < 0:
        return f"{_ENDED}signal {-done.returncode}"
    said = done.stderr.decode("utf-8", "replace").strip().partition("\n")[0][:200]
    return (said or f"status {done.returncode}") if done.returncode else ""


def _is_clang(compiler: str) -> bool | None:
    """Whether the compiler defines __clang__. None: it did not end within `_ANSWER` seconds."""
    try:
        said = subprocess.run(
            [compiler, "-dM", "-E", "-x", "c", os.devnull],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ANSWER,
        )
    except subprocess.TimeoutExpired:
        return None
    except OSError:
        return False
    return b"__clang__" in said.stdout


def _forget(kept: Path) -> None:
    """Remove libraries older than `EXPIRES` from the folder of the one that was just compiled."""
    with contextlib.suppress(OSError):
        for path in kept.parent.glob("*.so"):
            if path.stat().st_mtime < time.time() - EXPIRES:
                path.unlink()


def _usable(path: Path) -> bool:
    """Whether the file is this user's and complete: it ends with the hash of its content."""
    if not (_ours(path) and path.is_file() and path.stat().st_size <= _LARGEST):
        return False  # to open a named pipe would wait for ever
    data = path.read_bytes()
    return data[-_DIGEST:] == _digest(data[:-_DIGEST])


_DIGEST = 32
_LARGEST = 64 << 20  # bytes; a library has less than one MiB


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _ours(path: Path) -> bool:
    """Whether the path exists, belongs to this user, and only this user may write to it."""
    try:
        about = path.stat()
    except OSError:
        return False
    owner = not hasattr(os, "getuid") or about.st_uid == os.getuid()
    return owner and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
