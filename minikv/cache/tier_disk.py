"""File operations of a tier: open, lock, read and write completely, and reserve disk space."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minikv.cache.tier_rows import TierError

FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags with which a tier's file is opened."""

_MOST = 512  # buffers in one preadv or pwritev; systems allow 1,024

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def opened(path: Path, flags: int) -> int:
    """Open a regular file that is not a link, and return its descriptor. Raises TierError."""
    try:
        handle = os.open(path, flags)
    except OSError as error:
        raise TierError(said(path, error)) from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise TierError(f"{path.name} is not a regular file")
    return handle


def lock(handle: int, path: Path) -> None:
    """Lock the file. Raises TierError if another process holds the lock. On a file system without
    locks, does nothing."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TierError(f"{path.name} is open in another minikv") from None
    except OSError:
        return


def read(handle: int, size: int, at: int) -> bytes:
    """Read `size` bytes at the offset `at`. Raises OSError."""
    data = bytearray(size)
    whole(os.preadv, handle, [data], at)
    return bytes(data)


def whole(
    call: Callable[[int, list[memoryview], int], int],
    handle: int,
    pieces: Sequence[Bytes | bytes | bytearray],
    at: int,
) -> None:
    """Repeat `call`, which is `preadv` or `pwritev`, until all of `pieces` is transferred. Raises
    OSError, also if the file ends early."""
    left = [memoryview(piece) for piece in pieces if len(piece)][::-1]  # type: ignore[arg-type]
    while left:
        done = call(handle, left[: -_MOST - 1 : -1], at)
        if not done:
            raise OSError(errno.EIO, "the file is shorter than it was")
        at += done
        while left and done >= len(left[-1]):
            done -= len(left.pop())
        if done:
            left[-1] = left[-1][done:]


def allocate(handle: int, at: int, size: int) -> None:
    """Reserve disk space for `size` bytes at the offset `at`. Raises OSError."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(handle, at, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    facts = os.fstatvfs(handle)  # space cannot be reserved here: check at least that it is free
    if facts.f_bavail * facts.f_frsize < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def said(path: Path, error: OSError) -> str:
    """The message for an error with a file."""
    return f"{path.name}: {error.strerror or error}"
