"""The files of a saved chat: written in one step, read whole and checked, locked while open."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from minikv.chat.report import clipped
from minikv.cli.paths import chats_folder
from minikv.errors import UsageError
from minikv.models.packed_files import make

TRANSCRIPT = "chat.jsonl"
REREAD = "--reread takes the conversation up without it: the next question reads it again"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PART = re.compile(r"(cache-[0-9a-f]{16}\.safetensors|document-[0-9a-f]{16}\.txt)")
TRANSCRIPT_BYTES = 256 << 20
"""The largest transcript: some 100,000 turns."""
DAMAGE = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RecursionError,
)
"""What reading a damaged file may raise. The checks find accidental changes, not a file that
someone made with a valid checksum."""
_UNUSED = "nothing of it was used; --reread works if only the cache is damaged"


def is_name(name: str) -> bool:
    """Whether a chat can have this name."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str) -> None:
    """Raise UsageError if the name is not a plain file name."""
    if not is_name(name):
        raise UsageError(
            f"{name!r} cannot be the name of a chat",
            "letters, digits, dots, dashes and underscores, at most 64, beginning with a letter or "
            "digit",
        )


def opened(path: Path) -> Any:
    """A regular file to read, no link. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(0, "not a regular file")
    return open(handle, "rb")


def write(folder: Path, name: str, data: bytes) -> None:
    """Put a file there in one step. On OSError, what was there before stays."""
    temporary = folder / f".{name}.{os.getpid()}.tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    handle = os.open(temporary, flags, 0o600)
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / name)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_part(folder: Path, kind: str, ending: str, data: bytes) -> dict[str, object]:
    """Write a file whose name has its checksum, unless it is there and undamaged. Returns what
    `read_part` checks. Raises OSError."""
    mark = hashlib.sha256(data).hexdigest()
    name = f"{kind}-{mark[:16]}.{ending}"
    if not _is_there(folder / name, mark):
        write(folder, name, data)
    return {"file": name, "bytes": len(data), "sha256": mark}


def read_part(folder: Path, record: Mapping[str, Any], limit: int) -> bytes:
    """A file as `write_part` wrote it. Raises ValueError where it was altered, OSError."""
    name = record["file"]
    if _PART.fullmatch(name) is None:
        raise ValueError(f"{name!r:.80} is not a file of a chat")
    if not 0 <= record["bytes"] <= limit:
        raise ValueError(f"{name} is too large")
    with opened(folder / name) as file:
        data: bytes = file.read(record["bytes"] + 1)
    if len(data) != record["bytes"]:
        raise ValueError(f"{name} is not as long as it was written: it was cut or edited")
    if hashlib.sha256(data).hexdigest() != record["sha256"]:
        raise ValueError(f"the checksum of {name} does not fit: it was edited or damaged")
    return data


def _is_there(path: Path, mark: str) -> bool:
    try:
        with opened(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == mark
    except OSError:
        return False


@contextlib.contextmanager
def all_or_nothing(folder: Path) -> Iterator[None]:
    """Parts that are written inside are removed again if the save fails: a full disk is not to be
    filled with what no transcript names."""
    before = set(os.listdir(folder))
    try:
        yield
    except Exception:  # not Ctrl-C, which may come when the transcript is there and names them
        with contextlib.suppress(OSError):
            for name in set(os.listdir(folder)) - before:
                if _PART.fullmatch(name):
                    os.unlink(folder / name)
        raise


def prune(folder: Path, named: Collection[str]) -> None:
    """Remove files of earlier saves and of saves that were cut off, but those `named`."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            old = _PART.fullmatch(name) is not None and name not in named
            if name.startswith(".") and name.endswith(".tmp") and (folder / name).is_dir():
                shutil.rmtree(folder / name, ignore_errors=True)  # an unfinished copy of a tier
            elif old or (name.startswith(".") and name.endswith(".tmp")):
                os.unlink(folder / name)


def new_folder(name: str) -> str:
    """Make a directory of this name, or of the next free one; returns its name. Raises OSError."""
    root = private(chats_folder())
    for i in range(1, 1000):
        candidate = name if i == 1 else f"{name}-{i}"
        try:
            os.mkdir(root / candidate, 0o700)
            os.chmod(root / candidate, 0o700)  # for any umask
        except FileExistsError:
            continue
        return candidate
    raise OSError(0, f"no free name like {name}")


def private(folder: Path) -> Path:
    """Make a directory and its missing parents for the user alone. Raises OSError."""
    make(folder)
    return folder


def lock(name: str) -> int | None:
    """Hold the chat: an open handle, or None where locks do not work. Raises UsageError if another
    process holds it."""
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        handle = os.open(chats_folder() / name / "lock", flags, 0o600)
    except OSError:
        return None  # a read-only home: nobody can write there
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UsageError(
            f"chat {name} is open in another minikv", "leave it there, or open another chat"
        ) from None
    except OSError:
        os.close(handle)
        return None
    if not holds(name, handle):  # its file was exchanged in this moment
        os.close(handle)
        return lock(name)
    return handle


def holds(name: str, handle: int) -> bool:
    """Whether this handle still locks the chat: nobody removed or exchanged the file."""
    try:
        there = os.lstat(chats_folder() / name / "lock")
    except OSError:
        return False
    return os.path.samestat(there, os.fstat(handle))


def written(name: str) -> tuple[int, ...] | None:
    """What changes whenever the chat is saved, by whomever; None if it never was."""
    try:
        facts = os.lstat(chats_folder() / name / TRANSCRIPT)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns


@contextlib.contextmanager
def damage(name: str) -> Iterator[None]:
    """Turns every error that a damaged file leads to into one UsageError with the reason."""
    try:
        yield
    except FileNotFoundError as error:
        missing = Path(str(error.filename)).name
        raise UsageError(f"chat {name} is damaged: {missing} is missing", _UNUSED) from None
    except OSError as error:
        raise UsageError(f"chat {name} cannot be read: {error.strerror}") from None
    except DAMAGE as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"chat {name} is damaged: {clipped(what, 200)}", _UNUSED) from None
