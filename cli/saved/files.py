"""Names and folders of saved chats, and small files that only the user can read."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path
from typing import Any

from minikv.cli.paths import chats_folder
from minikv.errors import UsageError
from minikv.models.packed_files import make

LAST = "last-ask"
"""The name of the chat of the last `minikv ask`, for `--continue`. The next one takes its place."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def is_name(name: str) -> bool:
    """Whether a chat can have this name."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str, *, own: bool = False) -> None:
    """Raise UsageError if the name is not a plain file name. own: or is one that the user cannot
    give a chat."""
    if not is_name(name):
        raise UsageError(
            f"{name!r} cannot be the name of a chat",
            "letters, digits, dots, dashes and underscores, at most 64, beginning with a letter or "
            "digit",
        )
    if own and name == LAST:
        raise UsageError(f"{name} is the name of the last `minikv ask`", "choose another name")


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


def opened(path: Path) -> Any:
    """A regular file to read, no link. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(0, "not a regular file")
    return open(handle, "rb")


def write(folder: Path, name: str, data: bytes, mode: int = 0o600) -> None:
    """Put a file there in one step. If that fails, what was there before stays. mode: less what the
    user's umask takes away. Raises OSError."""
    temporary = folder / f".minikv-{os.getpid()}.tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    handle = os.open(temporary, flags, mode)
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
