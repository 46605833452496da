"""The files that documents were read from: recorded when read, compared when a chat is opened."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable
from typing import TYPE_CHECKING

from minikv.chat.transcript import Source

if TYPE_CHECKING:
    from minikv.chat.transcript import Document


def source_of(path: str) -> Source | None:
    """A regular file as it is now; None for anything else, and where it cannot be read."""
    if os.path.abspath(path).startswith(("/dev/", "/proc/")):
        return None  # a stream: in the next process this name is another one
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer for ever.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with open(handle, "rb") as file:
            facts = os.fstat(handle)
            if not stat.S_ISREG(facts.st_mode):
                return None
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError):
        return None
    return Source(os.path.abspath(path), facts.st_size, facts.st_mtime_ns, digest)


def changes(documents: Iterable[Document]) -> list[str]:
    """A line for each document whose file has changed since it was read."""
    lines = []
    for document in documents:
        state = document.source and _state(document.source)
        if state:
            lines.append(f"{document.name} {state}; this chat keeps the text as it was")
    return lines


def _state(source: Source) -> str:
    """How a file has changed, in words; "" if it has not."""
    try:
        facts = os.stat(source.path)
    except (FileNotFoundError, NotADirectoryError):
        return "is no longer there"
    except OSError:
        return "cannot be read any more"
    if (facts.st_size, facts.st_mtime_ns) == (source.size, source.mtime_ns):
        return ""
    now = source_of(source.path)
    if now is None:
        return "cannot be read any more"
    return "" if now.sha256 == source.sha256 else "was changed since it was read"
