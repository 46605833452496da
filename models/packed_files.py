"""Packed weights on disk: where they are, whose they are, and which leave when there are too many.

Importing this loads no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from minikv.models.errors import ModelError
from minikv.models.hub import open_regular

FORMAT = "minikv packed weights 2"
NAME = re.compile(r"[0-9a-f]{32}-[a-z0-9+]+\.safetensors")
PART = re.compile(r"\.[0-9a-f]{32}-[a-z0-9+]+\.[a-z0-9_]+\.part")
_HEADER = 16 << 20  # bytes
_ABANDONED = 86400.0
"""Seconds after which a part is one of a killed process, on a disk without locks."""


@dataclass(frozen=True, slots=True)
class PackedFile:
    """The packed weights of a model. `model` is the name of one of the hub, and the real path of a
    directory; "" is unknown. `folder`: the real path that it was loaded from. `used`: when it was
    last read or written, in seconds."""

    path: Path
    model: str
    folder: str
    bytes: int
    used: float


def store() -> Path:
    """The folder: cache/packed under $MINIKV_HOME, or packed in the user's cache directory. It need
    not be there. Raises OSError where there is no home directory."""
    if home := os.environ.get("MINIKV_HOME"):
        return Path(home).expanduser() / "cache" / "packed"
    from platformdirs.unix import Unix

    try:
        return Path(Unix("minikv").user_cache_path) / "packed"
    except RuntimeError:
        raise FileNotFoundError(2, "there is no home directory") from None


def listed(folder: Path | None = None) -> list[PackedFile]:
    """All of them, the longest unused first. What cannot be read has no model."""
    found = []
    with contextlib.suppress(OSError):
        for path in (store() if folder is None else folder).iterdir():
            if NAME.fullmatch(path.name):
                # Another process removed it; it is no file.
                with contextlib.suppress(OSError, ModelError), open_regular(path) as file:
                    about = os.fstat(file.fileno())
                    model, place = _whose(file)
                    found.append(PackedFile(path, model, place, about.st_size, about.st_mtime))
    return sorted(found, key=lambda one: (one.used, one.path.name))


def of_model(name: str) -> list[PackedFile]:
    """Those of a model of the hub, by its name, or the file of this name; where there is none,
    those of the directory."""
    place, found = os.path.realpath(os.path.expanduser(name)), listed()
    if not name:  # an unset variable of a script, not this directory
        return []
    named = [one for one in found if name in (one.model, one.path.name)]
    return named or [one for one in found if one.folder == place]


def remove(files: Collection[PackedFile]) -> int:
    """Remove them; the bytes that were given back. One that is gone already is none."""
    freed = 0
    for one in files:
        with contextlib.suppress(FileNotFoundError):
            one.path.unlink()
            freed += one.bytes
    return freed


def make(folder: Path) -> None:
    """A folder, and those above it that are not there, for the user alone. Raises OSError."""
    for missing in reversed([one for one in (folder, *folder.parents) if not one.is_dir()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def new_part(path: Path) -> BinaryIO:
    """A new file for the user alone, locked until it is closed, which says that its writer is
    there. Raises OSError."""
    while True:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with contextlib.suppress(OSError):  # a disk without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return open(handle, "wb", buffering=0)
        os.close(handle)  # `clear` was faster than the lock


def clear(folder: Path | None = None) -> None:
    """Remove the parts that killed processes left."""
    with contextlib.suppress(OSError):
        for path in (store() if folder is None else folder).iterdir():
            if PART.fullmatch(path.name):
                with contextlib.suppress(OSError, ModelError), open_regular(path) as file:
                    if _abandoned(file):
                        path.unlink()


def _abandoned(part: BinaryIO) -> bool:
    try:
        fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a disk without locks
        return os.fstat(part.fileno()).st_mtime < time.time() - _ABANDONED
    return True


def leaving(folder: Path, needs: int, limit: int, but: str) -> list[PackedFile]:
    """The longest unused that must go so that `needs` bytes more are at most `limit`. A file named
    `but` is about to be replaced, and does not count."""
    files = [one for one in listed(folder) if one.path.name != but]
    held, found = sum(one.bytes for one in files), []
    for one in files:
        if held + needs <= limit:
            break
        found.append(one)
        held -= one.bytes
    return found


def _whose(file: BinaryIO) -> tuple[str, str]:
    """Name and folder of the model in a file's header; "" for one that cannot be read. Raises
    OSError."""
    length = int.from_bytes(file.read(8), "little")
    try:
        about = json.loads(file.read(min(length, _HEADER)))["__metadata__"]
        return str(about["model"]), str(about["folder"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return "", ""
