"""The messages that were typed in earlier chats, in one file for the line editor."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit.history import History

from minikv.cli.saved.files import opened, private, write

ENTRIES = 1000
"""Messages that the file keeps."""
_LONGEST = 1 << 16  # bytes of a line; a longer message is not kept


class HistoryFile(History):
    """A file with a JSON string per line, which only its user may read.

    prompt_toolkit's own FileHistory has another format, follows links, keeps everything and makes
    files that others may read. Where a file cannot be read or written, the history is that of
    this chat alone.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def load_history_strings(self) -> Iterable[str]:
        """The newest messages, newest first."""
        messages, lines = [], []
        with contextlib.suppress(OSError), opened(self._path) as file:
            lines = file.read().decode(errors="replace").split("\n")
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                entry = json.loads(line)
                if isinstance(entry, str):
                    messages.append(entry)
        if len(messages) > ENTRIES:
            del messages[:-ENTRIES]
            with contextlib.suppress(OSError):  # another chat reads the old file or the new one
                write(self._path.parent, self._path.name, b"".join(map(_line, messages)))
        return reversed(messages)

    def store_string(self, string: str) -> None:
        """Add a message to the file."""
        line = _line(string)
        if len(line) > _LONGEST:
            return
        with contextlib.suppress(OSError):
            private(self._path.parent)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            with open(os.open(self._path, flags, 0o600), "ab", buffering=0) as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(line)


def _line(text: str) -> bytes:
    return json.dumps(text).encode() + b"\n"
