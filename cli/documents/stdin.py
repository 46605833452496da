"""Standard input: a document, or the lines that a chat reads its questions from."""

from __future__ import annotations

import codecs
import os
import re
import select
import stat
import sys

from minikv.cli.documents.text import (
    MAX_BYTES,
    encoding_of,
    invalid,
    refuse_binary,
    refuse_formats,
)
from minikv.cli.screen.terminal import Terminal
from minikv.errors import UsageError

STDIN = "standard input"
_PATIENCE = 3.0  # seconds without input on a pipe before we say that we wait for it


def read_stdin(terminal: Terminal) -> bytes:
    """What is piped in, at most one byte over the size limit."""
    stream = sys.stdin.buffer
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):
        mode = 0  # not a real file: a test's buffer
    if stat.S_ISDIR(mode):
        raise UsageError("standard input is a directory")
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        ready, _, _ = select.select([stream], [], [], _PATIENCE)
        if not ready:
            terminal.say("reading standard input; `< /dev/null` if there is nothing to read")
    return stream.read(MAX_BYTES + 1)


class PipedLines:
    """Each call returns the next line of standard input, without its end, as soon as it is there;
    the encoding is found as a document's is. Raises EOFError at the end, and UsageError if the
    first line is no text, or the last one ends within a character of UTF-16 or UTF-32."""

    def __init__(self) -> None:
        self._ready: list[str] = []  # lines that are read already, the next one last
        self._read = 0  # bytes
        self._decoder: codecs.IncrementalDecoder | None = None
        self._width = 1  # bytes of the shortest character

    def __call__(self) -> str:
        if self._ready:
            return self._ready.pop()
        stream = sys.stdin.buffer
        first = self._decoder is None
        line = ""
        while not line.endswith("\n"):
            data = stream.readline(MAX_BYTES)
            if self._decoder is None:
                self._decoder = self._opened(data)
            if not data:
                line += self._rest(self._decoder)
                break
            # In UTF-16 and UTF-32 the byte 0x0a need not be the last one of a line's end.
            data += stream.read(-len(data) % self._width)
            self._read += len(data)
            line += self._decoder.decode(data)
        if first:
            line = line.lstrip("\ufeff")  # a program may put its own mark before a text's
        if not line:
            raise EOFError
        lines = re.split(r"\r\n?|\n", line)
        if len(lines) > 1 and not lines[-1]:
            del lines[-1]  # it stands behind the last line's end
        self._ready = lines[::-1]
        return self._ready.pop()

    def _opened(self, data: bytes) -> codecs.IncrementalDecoder:
        refuse_formats(data, STDIN)
        encoding = encoding_of(data)
        self._width = {"utf-16": 2, "utf-32": 4}.get(encoding, 1)
        if self._width == 1:
            refuse_binary(data, STDIN)
        # Invalid bytes become lone surrogates, which the session refuses by name.
        errors = "surrogateescape" if self._width == 1 else "surrogatepass"
        return codecs.getincrementaldecoder(encoding)(errors)

    def _rest(self, decoder: codecs.IncrementalDecoder) -> str:
        """What is left at the end of the input. Raises UsageError if that is a part of a character,
        but in UTF-8 returns it as lone surrogates."""
        try:
            return decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            decoder.reset()
            at = self._read - len(error.object) + error.start
            label, byte = f"UTF-{8 * self._width}", error.object[error.start]
            hint = "it ends within a character: is it cut short?"
            raise invalid(STDIN, label, at, byte, hint) from None


def piped_document(terminal: Terminal) -> bytes:
    """Standard input as a document, for a chat: its questions then come from the terminal. Raises
    UsageError where there is none."""
    if sys.stdin.isatty():
        return read_stdin(terminal)
    try:
        handle = os.open("/dev/tty", os.O_RDWR)
    except OSError:
        raise UsageError(
            "standard input is the document, and there is no terminal to read questions from",
            'minikv ask "QUESTION" - takes a piped document',
        ) from None
    try:
        data = read_stdin(terminal)
        os.dup2(handle, 0)
    finally:
        os.close(handle)
    sys.stdin = os.fdopen(0, closefd=False)
    return data
