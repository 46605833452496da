"""Standard input: a document, or the lines that a chat reads its questions from."""

from __future__ import annotations

import io
import os
import select
import stat
import sys
from typing import Any

from minikv.cli.documents.text import MAX_BYTES, encoding_of, refuse_binary
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
        self._lines: io.TextIOWrapper | None = None

    def __call__(self) -> str:
        if self._lines is None:
            given: Any = sys.stdin.buffer
            stream = given if isinstance(given, io.BufferedReader) else io.BufferedReader(given)
            start = stream.peek(1)
            refuse_binary(start, STDIN)
            encoding = encoding_of(start)
            # Invalid bytes become lone surrogates, which the session refuses by name.
            errors = "surrogateescape" if encoding == "utf-8-sig" else "surrogatepass"
            self._lines = io.TextIOWrapper(stream, encoding, errors)
        try:
            line = self._lines.readline()
        except UnicodeDecodeError as error:
            what = f"{STDIN} is not valid {error.encoding.upper()}"
            raise UsageError(what, "it ends within a character: is it cut short?") from None
        if not line:
            raise EOFError
        return line.removesuffix("\n")


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
