"""Write a file that the user named, completely or not at all. Replace another only with --force."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from minikv.cli.terminal import clean
from minikv.errors import UsageError


def refuse(path: Path, force: bool) -> None:
    """Raise UsageError if `write` would not start: the path exists, is no regular file, or has no
    directory."""
    shown = clean(str(path))
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise UsageError(f"no directory {clean(str(path.parent))}", "make it first") from None
        return
    except OSError as error:
        raise _cannot(path, error) from None
    if not stat.S_ISREG(mode):
        raise UsageError(f"{shown} is not a regular file", "choose another name")
    if not force:
        raise UsageError(f"{shown} exists", "--force replaces it, or choose another name")


def write(path: Path, text: str, force: bool = False) -> int:
    """Write `text` as UTF-8; return the number of bytes. Raises UsageError, and then no file has
    changed."""
    refuse(path, force)
    data = text.encode()
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(prefix=".minikv-", dir=path.parent)
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            # Set the mode that the user's new files have; that of mkstemp forbids others to read.
            umask = os.umask(0)
            os.umask(umask)
            os.fchmod(file.fileno(), 0o666 & ~umask)
        os.replace(temporary, path)
        temporary = ""
    except OSError as error:
        raise _cannot(path, error) from None
    finally:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
    return len(data)


def _cannot(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"cannot write {clean(str(path))}: {error.strerror or error}", "nothing was written"
    )
