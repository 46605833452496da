"""The messages that were typed in earlier chats, in one file for the line editor."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit.history import History

from minikv.cli.saved.files import private

ENTRIES = 1000
"""Messages that the file keeps."""
_LARGEST = 16 << 20  # bytes that are read, the newest
_LONGEST = 1 << 20  # bytes of a line; a longer message is not kept


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
        try:
            # Without O_NONBLOCK a named pipe would wait for a writer for ever.
            handle = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(handle, "rb") as file:
                about = os.fstat(handle)
                if not stat.S_ISREG(about.st_mode):
                    return []
                cut = about.st_size > _LARGEST
                file.seek(max(0, about.st_size - _LARGEST))
                found = file.read(_LARGEST).decode(errors="replace").split("\n")
        except OSError:
            return []
        lines = [line for line in found[cut:] if line]  # of what is cut, the first line is a part
        messages = []
        for line in lines[-ENTRIES:]:
            with contextlib.suppress(ValueError, RecursionError):
                entry = json.loads(line)
                if isinstance(entry, str):
                    messages.append(entry)
        if len(lines) > ENTRIES or cut:
            self._replace("".join(map(_line, messages)))
        return reversed(messages)

    def store_string(self, string: str) -> None:
        """Add a message to the file."""
        line = _line(string).encode()
        if len(line) > _LONGEST:
            return
        with contextlib.suppress(OSError):
            private(self._path.parent)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            handle = os.open(self._path, flags, 0o600)
            try:
                os.fchmod(handle, 0o600)
                os.write(handle, line)
            finally:
                os.close(handle)

    def _replace(self, text: str) -> None:
        """Write the whole file in one step: another chat reads the old file or the new one."""
        with contextlib.suppress(OSError):
            handle, temporary = tempfile.mkstemp(prefix="history.", dir=self._path.parent)
            try:
                with open(handle, "w", encoding="utf-8") as file:
                    file.write(text)
                os.replace(temporary, self._path)
            except OSError:
                os.unlink(temporary)


def _line(text: str) -> str:
    return json.dumps(text) + "\n"
