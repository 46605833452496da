"""Finds files with packed weights, and the models that they belong to.

Importing this does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from minikv.models.errors import ModelError
from minikv.models.files import open_regular

FORMAT = "minikv packed weights 2"
NAME = re.compile(r"[0-9a-f]{32}-[a-z0-9+]+\.safetensors")
PART = re.compile(r"\.[0-9a-f]{32}-[a-z0-9+]+\.[a-z0-9_]+\.part")
_HEADER = 16 << 20  # bytes
_ABANDONED = 3600.0
"""Seconds without a write after which an unfinished file must belong to a killed process."""


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


def listed() -> list[PackedFile]:
    """All files with packed weights, by name. For a damaged file, `model` is ""."""
    found = []
    with contextlib.suppress(OSError):
        for path in store().iterdir():
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
    if not name:  # perhaps an unset variable in a script: do not interpret it as this directory
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
            missing.chmod(0o700)  # whatever the umask
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def clear() -> None:
    """Remove unfinished files that killed processes left."""
    with contextlib.suppress(OSError):
        for path in store().iterdir():
            with contextlib.suppress(OSError):
                about = path.lstat()
                left = about.st_mtime < time.time() - _ABANDONED
                if PART.fullmatch(path.name) and stat.S_ISREG(about.st_mode) and left:
                    path.unlink()


def _whose(file: BinaryIO) -> tuple[str, str]:
    """Name and folder of the model, from a file's header; both "" if the header is damaged. Raises
    OSError."""
    length = int.from_bytes(file.read(8), "little")
    try:
        about = json.loads(file.read(min(length, _HEADER)))["__metadata__"]
        return str(about["model"]), str(about["folder"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return "", ""
