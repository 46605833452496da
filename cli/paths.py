"""Where a user's files are: under $MINIKV_HOME, else in the XDG directories. How they are opened
and written: for the user alone, and no link is followed. How much JSON is parsed.

They are used on macOS too, because minikv has always kept its files there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from pathlib import Path
from typing import Any

from minikv.checks import quoted
from minikv.errors import UsageError

HOME = "MINIKV_HOME"


def config_file() -> Path:
    """The user's configuration file. Raises UsageError if there is no home directory."""
    return _own("config.toml") or _under("user_config_path") / "config.toml"


def chats_folder() -> Path:
    """The directory of saved chats. Raises UsageError if there is no home directory."""
    return _own("chats") or _under("user_data_path") / "chats"


def history_file() -> Path:
    """The history of messages typed in chats. Raises UsageError if there is no home directory."""
    return _own("history") or _under("user_state_path") / "history"


def _own(name: str) -> Path | None:
    home = os.environ.get(HOME)
    try:
        return Path(home).expanduser() / name if home else None
    except RuntimeError:
        raise UsageError(
            f"{HOME} names the home directory of a user who does not exist: {quoted(home or '')}",
            f"set {HOME} to a directory",
        ) from None


def _under(kind: str) -> Path:
    from platformdirs.unix import Unix

    try:
        found: Path = getattr(Unix("minikv"), kind)
    except RuntimeError:
        raise UsageError("there is no home directory", f"set {HOME} to a directory") from None
    return found


def private(folder: Path) -> Path:
    """Make a directory and its missing parents for the user alone. Raises OSError."""
    for missing in reversed([one for one in (folder, *folder.parents) if not one.is_dir()]):
        with contextlib.suppress(FileExistsError):
            missing.mkdir(mode=0o700)
            missing.chmod(0o700)  # whatever the umask
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    return folder


def opened(path: Path | str, *, links: bool = False) -> Any:
    """A regular file to read; `links`: also behind a link. Raises OSError, ValueError."""
    # Without O_NONBLOCK, opening a named pipe would wait for a writer forever.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW))
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


# -- the size of JSON -----------------------------------------------------------------------------

CONTAINERS, ITEMS = 1_000_000, 5_000_000
"""The most lists and objects, and the most commas, of one file, outside texts. An object takes
64 bytes or more, a number 8 to 40."""

_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A text, or the rest of the file after a quotation mark without a second one. Otherwise each
escaped mark in the rest would be tried as a beginning, which is quadratic."""
_PIECE = re.compile(rb'(?:[^"]*+' + _TEXT.pattern + rb"){1,1000}+|[^\"]++", re.DOTALL)
"""Up to 1,000 texts with the characters before them, or the rest, so that little is copied at
once."""


def refuse_many(data: bytes) -> None:
    """Raise ValueError if a JSON file has more lists, objects or items than any real one."""
    containers, items = data.count(b"{") + data.count(b"["), data.count(b",")
    if containers <= CONTAINERS and items <= ITEMS:
        return
    containers = items = 0
    for piece in _PIECE.finditer(data):  # perhaps they are in texts
        bare = _TEXT.sub(b"", piece[0])
        containers += bare.count(b"{") + bare.count(b"[")
        items += bare.count(b",")
        if containers > CONTAINERS or items > ITEMS:
            raise ValueError(
                f"more than {CONTAINERS:,} lists and objects, or {ITEMS:,} items, are too many"
            )
