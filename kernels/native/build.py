"""Compiles the C sources of `kernels` once, with the machine's own compiler.

The library is kept in the user's cache directory, or else in a temporary directory of the user's
own. Its name is a hash of the sources, the compiler and the processor. A hash of its content is
appended to it, because loading a truncated library can kill the process. A copy of the checked
bytes is loaded, so that nobody can exchange the file between check and use. Without a compiler, or
a directory for the library, `library` says so, and torch computes. This module does not import
torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parents[1]
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
FLAG_SETS = (
    ("-march=native", "-fopenmp"),
    ("-march=native", "-fopenmp-simd"),
    ("-march=native", "-Wno-unknown-pragmas"),
    ("-Wno-unknown-pragmas",),
)
"""Flags for threads, for `omp simd` only, and for plain C. The first set that the compiler accepts
is used, except Clang's threads: its OpenMP library and torch's do not work in one process."""
TIMEOUT = 120.0  # seconds for the compiler
_ANSWER = 5.0  # seconds for an empty file; a compiler that takes longer hangs
_ROOM = 32 << 20  # bytes that must be free; the objects and the library take less than 4 MiB
EXPIRES = 30 * 86400.0  # seconds; when a library is made, older ones are removed
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
        name = f"{key(compiler)}.so"
        for place in _folders():
            data = _checked(place / name)
            if data is not None:
                with contextlib.suppress(OSError):  # if it cannot be loaded, compile again
                    return _loaded(data), ""
        folder, why = store()
        if folder is None:
            return None, why
        with tempfile.TemporaryDirectory(dir=folder) as made:
            found = Path(made, "native.so")
            why = _compile(compiler, found)
            if why:
                return None, why
            data = found.read_bytes()
            with found.open("ab") as file:
                file.write(_digest(data))
            found.chmod(0o700)  # whatever the umask: see `_owned`
            os.replace(found, folder / name)
        _forget(folder)
        kept = _checked(folder / name)  # the path may have changed since `store`
        if kept is None:
            return None, f"the library compiled in {folder} is damaged, or not yours alone"
        return _loaded(kept), ""
    except OSError as error:
        return None, f"the compiled kernels cannot be kept or loaded: {error.strerror or error}"


def compiles() -> bool:
    """Whether the next call of `library` will compile, which takes seconds."""
    compiler = find()
    if switched_off() or compiler is None or library.cache_info().currsize:
        return False
    with contextlib.suppress(OSError):
        name = f"{key(compiler)}.so"
        kept = any(_checked(folder / name) is not None for folder in _folders())
        return not kept and store()[0] is not None
    return False


def remarks() -> list[str]:
    """Lines that a user should see before the library is compiled."""
    compiler = find()
    found: list[str] = []
    if switched_off() or compiler is None or library.cache_info().currsize:
        return found
    with contextlib.suppress(OSError):
        for place in _folders():
            path = place / f"{key(compiler)}.so"
            if os.path.lexists(path) and not path.is_dir() and _checked(path) is None:
                why = "it is damaged, or not yours alone"
                found.append(f"{path} cannot be used ({why}): the kernels are compiled again")
        folder, why = store()
        if folder is not None and why:
            found.append(f"{why}: the compiled kernels are kept in {folder}")
    return found


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


def store() -> tuple[Path | None, str]:
    """The folder for a new library, made if necessary, and why it is not in the user's cache
    directory; or None, and why there is none."""
    reasons = [] if _cache() else ["there is no home directory"]
    for folder in _folders():
        why = _unfit(folder)
        if not why:
            return folder, "; ".join(reasons)
        reasons.append(why)
    return None, "; ".join(reasons)


def _folders() -> list[Path]:
    """The possible folders of a library: minikv/kernels under $XDG_CACHE_HOME or ~/.cache, and a
    temporary directory of the user's own, which the next start finds again. The paths contain no
    links, except that the last folder may be one."""
    found = [_cache()]
    with contextlib.suppress(OSError):
        found.append(Path(tempfile.gettempdir()) / f"minikv-kernels-{os.getuid()}")
    places = [folder for folder in found if folder is not None]
    return [Path(os.path.realpath(folder.parent)) / folder.name for folder in places]


def _cache() -> Path | None:
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not base and os.environ.get("HOME") == "":
        return None  # Path.home() would be the root directory
    try:
        root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return root / "minikv" / "kernels"


def _unfit(folder: Path) -> str:
    """Make the folder if it does not exist. Returns why no library can be kept in it, or ""."""
    try:
        for missing in reversed([p for p in (folder, *folder.parents) if not os.path.lexists(p)]):
            with contextlib.suppress(FileExistsError):
                missing.mkdir(mode=0o700)
                missing.chmod(0o700)  # whatever the umask
        why = _open_to_others(folder)
        if not why and not os.access(folder, os.W_OK | os.X_OK):
            why = f"{folder} cannot be written to"
        usage = shutil.disk_usage(folder)
        if not why and usage.total and usage.free < _ROOM:
            why = f"less than {_ROOM >> 20} MiB are free in {folder}"
    except OSError as error:
        return f"{folder} cannot be made ({error.strerror})"
    return why


def _open_to_others(folder: Path) -> str:
    """Why another user could put a library into the folder, or exchange it; or "". Raises
    OSError."""
    about = folder.lstat()
    if not (stat.S_ISDIR(about.st_mode) and _owned(about)):
        return f"{folder} is not yours alone"
    # In a user namespace root has the number of an unknown user.
    trusted = {os.getuid(), 0, Path(folder.anchor).lstat().st_uid}
    for holder in folder.parents:
        about = holder.lstat()
        # In a sticky folder, users can rename only their own files.
        exchanged = _shared(about) and not about.st_mode & stat.S_ISVTX
        if about.st_uid not in trusted or exchanged:
            return f"other users may change {holder}"
    return ""


def sources() -> list[Path]:
    """The C files, in a fixed order."""
    return sorted(FOLDER.glob("*/*.c"))


def headers() -> str:
    """The compiler's option for the folder of the headers that all sources share."""
    return f"-I{FOLDER / 'native'}"


def key(compiler: str) -> str:
    """The name of the library's file: a hash of everything that the library depends on."""
    found = hashlib.sha256()
    for path in (*sources(), *sorted(FOLDER.glob("*/*.h"))):
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    about = os.stat(compiler)
    for fact in (compiler, about.st_size, about.st_mtime_ns, FLAGS, FLAG_SETS, _processor()):
        found.update(repr(fact).encode())
    return found.hexdigest()[:24]


def _processor() -> str:
    """The facts that -march=native depends on, in which machines that share a home directory may
    differ."""
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
            command = (compiler, *FLAGS, *flags, headers())
            commands = [
                [*command, "-c", str(path), "-o", str(target.with_name(path.stem))]
                for path in sources()
            ]
            made = [each[-1] for each in commands]
            found = [*pool.map(_run, commands)]
        if not any(found):
            found = [_run([compiler, *FLAGS, *flags, "-shared", *made, "-o", str(target), "-lm"])]
        if not any(found):
            return ""
        ended = next((why for why in found if why.startswith(_ENDED)), "")
        said = ended or said or next(filter(None, found))
        if ended:
            break  # other flags would not help, or would make a slower library
    return f"{Path(compiler).name} failed: {said}"


_ENDED = "it ended with "
# Errors that other flags would not prevent.
_HOPELESS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ENOMEM, errno.EMFILE)


def _run(command: list[str]) -> str:
    """Run the compiler. Returns the first line of its errors, or ""."""
    # Its temporary files are made next to the target, and its errors are not translated.
    folder = os.path.dirname(command[command.index("-o") + 1])
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT,
            env={**os.environ, "TMPDIR": folder, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{_ENDED}{type(error).__name__}"
    if done.returncode < 0:
        return f"{_ENDED}signal {-done.returncode}"
    if not done.returncode:
        return ""
    said = done.stderr.decode("utf-8", "replace").strip()
    for number in _HOPELESS:
        if (why := os.strerror(number)) in said:
            return f"{_ENDED}the error: {why}"
    return said.partition("\n")[0][:200] or f"status {done.returncode}"


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


def _forget(folder: Path) -> None:
    """Remove libraries older than `EXPIRES` from the folder."""
    with contextlib.suppress(OSError):
        for path in folder.glob("*.so"):
            if _NAME.fullmatch(path.name) and path.stat().st_mtime < time.time() - EXPIRES:
                path.unlink()


_NAME = re.compile(r"[0-9a-f]{24}\.so")
_DIGEST = 32
_LARGEST = 64 << 20  # bytes; a library has less than one MiB


def _checked(path: Path) -> bytes | None:
    """The library in the file, if the file is this user's and complete: it ends with the hash of
    its content. None if not."""
    try:
        if _open_to_others(path.parent):
            return None
        # No links; and opening a named pipe would wait forever.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(handle, "rb") as file:
            about = os.fstat(handle)
            regular = stat.S_ISREG(about.st_mode) and about.st_size <= _LARGEST
            if not (regular and _owned(about)):
                return None
            data = file.read(_LARGEST + 1)
    except OSError:
        return None
    return data[:-_DIGEST] if data[-_DIGEST:] == _digest(data[:-_DIGEST]) else None


def _loaded(data: bytes) -> ctypes.CDLL:
    """Load a library from memory, or from a copy that only this process knows. Raises OSError."""
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("minikv-kernels")
        try:
            with open(handle, "wb", closefd=False) as file:
                file.write(data)
            # It stays open: otherwise the loader would confuse it with the next file of this
            # number.
            return ctypes.CDLL(f"/proc/self/fd/{handle}")
        except OSError:  # the system runs nothing from memory, or has no /proc
            os.close(handle)
    with tempfile.TemporaryDirectory() as made:
        path = Path(made, "native.so")
        path.write_bytes(data)
        return ctypes.CDLL(str(path))


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _owned(about: os.stat_result) -> bool:
    """Whether the file or folder belongs to this user, and only this user may write to it."""
    return about.st_uid == os.getuid() and not _shared(about)


def _shared(about: os.stat_result) -> bool:
    """Whether anyone but the owner and this user's own group may write to the file or folder."""
    return bool(
        about.st_mode & stat.S_IWOTH or (about.st_mode & stat.S_IWGRP and not _own(about.st_gid))
    )


def _own(group: int) -> bool:
    """Whether a group is this user's alone: many systems make one for each user, and make folders
    writable for it."""
    import grp
    import pwd

    try:
        user, about = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
    except KeyError:
        return False
    name = user.pw_name
    return user.pw_gid == group and about.gr_name == name and not {*about.gr_mem} - {name}
