"""Files with packed weights: where they are, and to which model they belong.

Importing this does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
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
"""On a disk without locks: seconds after which an unfinished file is taken to be left by a killed
process."""


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A file with the packed weights of a model. model: a hub id, or the real path of a directory;
    "" if not known. folder: the real path that the model was loaded from."""

    path: Path
    model: str
    folder: str
    bytes: int


def store() -> Path:
    """The folder of the files: cache/packed under $MINIKV_HOME, or packed in the user's cache
    directory. It need not exist. Raises OSError if there is no home directory."""
    try:
        if home := os.environ.get("MINIKV_HOME"):
            return Path(home).expanduser() / "cache" / "packed"
        from platformdirs.unix import Unix

        return Path(Unix("minikv").user_cache_path) / "packed"
    except RuntimeError:
        raise FileNotFoundError(2, "there is no home directory") from None


def listed(folder: Path | None = None) -> list[PackedFile]:
    """All files with packed weights, by name. For a file that is damaged, `model` is ""."""
    found = []
    with contextlib.suppress(OSError):
        for path in (store() if folder is None else folder).iterdir():
            if NAME.fullmatch(path.name):
                # Skip it if another process has removed it, or it is not a regular file.
                with contextlib.suppress(OSError, ModelError), open_regular(path) as file:
                    about = os.fstat(file.fileno())
                    model, place = _whose(file)
                    found.append(PackedFile(path, model, place, about.st_size))
    return sorted(found, key=lambda one: one.path.name)


def of_model(name: str) -> list[PackedFile]:
    """The files of the model with this hub id, or the file with this name; if there is none, the
    files of the model in this directory."""
    place, found = os.path.realpath(os.path.expanduser(name)), listed()
    if not name:  # perhaps an unset variable in a script: do not take it as this directory
        return []
    named = [one for one in found if name in (one.model, one.path.name)]
    return named or [one for one in found if one.folder == place]


def remove(files: Collection[PackedFile]) -> int:
    """Remove the files. Returns the bytes that were freed; a file that no longer exists does not
    count."""
    freed = 0
    for one in files:
        with contextlib.suppress(FileNotFoundError):
            one.path.unlink()
            freed += one.bytes
    return freed


def make(folder: Path) -> None:
    """Create a folder and its missing parents with mode 0700. Raises OSError."""
    for missing in reversed([one for one in (folder, *folder.parents) if not one.is_dir()]):
        with contextlib.suppress(FileExistsError):
            missing.mkdir(mode=0o700)
            missing.chmod(0o700)  # for any umask
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def new_part(path: Path) -> BinaryIO:
    """Create a file that only the user can read. It is locked until it is closed, so that `clear`
    knows that it is being written. Raises OSError."""
    while True:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with contextlib.suppress(OSError):  # a disk without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return open(handle, "wb", buffering=0)
        os.close(handle)  # `clear` removed the file before it was locked


def clear(folder: Path | None = None) -> None:
    """Remove unfinished files that killed processes left."""
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


def _whose(file: BinaryIO) -> tuple[str, str]:
    """Name and folder of the model, from a file's header; both "" if the header is damaged. Raises
    OSError."""
    length = int.from_bytes(file.read(8), "little")
    try:
        about = json.loads(file.read(min(length, _HEADER)))["__metadata__"]
        return str(about["model"]), str(about["folder"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return "", ""
