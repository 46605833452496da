"""Compiling the C sources of this folder with the machine's own compiler, once: the library is kept
under the user's cache directory, named after the sources, the compiler and the processor.

Nothing here imports torch. Where there is no compiler, `library` says why, and the torch twins
compute.
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
# With threads, with `omp simd` alone, and as plain C: what a compiler takes first. clang's threads
# are another library's than torch's, and two of them in one process do not get on.
WAYS = (
    ("-march=native", "-fopenmp"),
    ("-march=native", "-fopenmp-simd"),
    ("-march=native", "-Wno-unknown-pragmas"),
    ("-Wno-unknown-pragmas",),
)
PATIENCE = 120.0  # seconds for the compiler
OLD = 30 * 86400.0  # seconds after which a library that something newer has replaced goes
OFF = "MINIKV_NATIVE"
"""Environment variable: 0 is as if there were no compiler."""


@cache
def library() -> tuple[ctypes.CDLL | None, str]:
    """(the library, "") or (None, why there is none). Compiles it when it is first needed."""
    if switched_off():
        return None, f"{OFF} is 0"
    compiler = find()
    if compiler is None:
        return None, "there is no C compiler (cc, gcc or clang)"
    try:
        folder = store()
        path = None if folder is None else folder / f"{key(compiler)}.so"
        if path is not None and _ours(path):
            with contextlib.suppress(OSError):  # a damaged one is made anew
                return ctypes.CDLL(str(path)), ""
        if folder is not None and not os.access(folder, os.W_OK):
            folder = path = None
        with tempfile.TemporaryDirectory(dir=folder) as made:
            found = Path(made, "native.so")
            why = _compile(compiler, found)
            if why:
                return None, why
            if path is not None:
                found.chmod(0o700)  # whatever the umask says: see `_ours`
                os.replace(found, path)
                _forget(path)
            return ctypes.CDLL(str(path or found)), ""
    except OSError as error:
        return None, f"the compiled kernels cannot be kept or loaded: {error.strerror or error}"


def compiles() -> bool:
    """`library` will have to compile, which takes seconds."""
    compiler = find()
    if switched_off() or compiler is None or library.cache_info().currsize:
        return False
    try:
        folder = store()
        return folder is None or not _ours(folder / f"{key(compiler)}.so")
    except OSError:
        return False


def switched_off() -> bool:
    """Nobody wants the library: see `OFF`."""
    return os.environ.get(OFF) == "0"


def find() -> str | None:
    """The compiler: $CC if it is one, or the first of `COMPILERS`."""
    for name in (os.environ.get("CC", ""), *COMPILERS):
        found = shutil.which(name) if name else None
        if found is not None:
            return found
    return None


def store() -> Path | None:
    """Where libraries are kept, made if need be: minikv/kernels under $XDG_CACHE_HOME or ~/.cache.
    None if that cannot be or is not the user's alone: a library is run as it is found."""
    base = os.environ.get("XDG_CACHE_HOME", "")
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
    """A name that changes whenever the library would."""
    found = hashlib.sha256()
    for path in (*sources(), *sorted(FOLDER.glob("*.h"))):
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    about = os.stat(compiler)
    for fact in (compiler, about.st_size, about.st_mtime_ns, FLAGS, WAYS, _processor()):
        found.update(repr(fact).encode())
    return found.hexdigest()[:24]


def _processor() -> str:
    """What -march=native depends on: a home directory may be on machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return platform.platform() + platform.processor()
    names = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU part")
    return "\n".join(line for line in lines if line.partition(":")[0].strip() in names)


def _compile(compiler: str, target: Path) -> str:
    """Compile to `target`, all files at once; why it failed, or ""."""
    said = ""
    for way in WAYS[1:] if _is_clang(compiler) else WAYS:
        with ThreadPoolExecutor() as pool:
            commands = [
                [compiler, *FLAGS, *way, "-c", str(path), "-o", str(target.with_name(path.stem))]
                for path in sources()
            ]
            made = [command[-1] for command in commands]
            found = [*pool.map(_run, commands)]
        if not any(found):
            found = [_run([compiler, *FLAGS, *way, "-shared", *made, "-o", str(target), "-lm"])]
        if not any(found):
            return ""
        said = said or next(filter(None, found))
        if any(why.startswith(_ENDED) for why in found):
            break  # it was not the way: another one would only make a worse library
    return f"{Path(compiler).name} failed: {said}"


_ENDED = "it ended with "


def _run(command: list[str]) -> str:
    """What the compiler complained of, one line; "" if it was content."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{_ENDED}{type(error).__name__}"
    if done.returncode < 0:
        return f"{_ENDED}signal {-done.returncode}"
    said = done.stderr.decode("utf-8", "replace").strip().partition("\n")[0][:200]
    return (said or f"status {done.returncode}") if done.returncode else ""


def _is_clang(compiler: str) -> bool:
    try:
        said = subprocess.run(
            [compiler, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return b"clang" in said.stdout.lower()


def _forget(kept: Path) -> None:
    """Remove what has not been made for long, beside the library that was made just now."""
    with contextlib.suppress(OSError):
        for path in kept.parent.glob("*.so"):
            if path.stat().st_mtime < time.time() - OLD:
                path.unlink()


def _ours(path: Path) -> bool:
    """It exists, belongs to this user, and nobody else may write to it."""
    try:
        about = path.stat()
    except OSError:
        return False
    owner = not hasattr(os, "getuid") or about.st_uid == os.getuid()
    return owner and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
