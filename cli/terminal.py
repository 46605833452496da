"""The one place that writes: answers to stdout, everything else to stderr, all of it filtered.

Model output, documents, file names and library messages are untrusted: an escape sequence in them
could retitle the window, fill the clipboard or hide text. Dropping single characters, and never
matching sequences, cannot be defeated by splitting a sequence over two tokens.
"""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
from typing import TextIO

_DROPPED = (
    *(code for code in range(0x20) if chr(code) not in "\n\t"),  # C0, with ESC
    *range(0x7F, 0xA0),  # DEL and C1
    0x2028,  # line and paragraph separators
    0x2029,
    *range(0x202A, 0x202F),  # bidi embeddings and overrides
    *range(0x2066, 0x206A),  # bidi isolates
    *range(0xD800, 0xE000),  # lone surrogates
    *range(0xE0000, 0xE0080),  # tags, invisible
)
_FILTER: dict[int, None] = dict.fromkeys(_DROPPED)
_ASCII = str.maketrans({"·": "-", "›": ">", "…": "...", "×": "x", "–": "-"})
_STYLES = {"dim": "2", "warn": "33", "bad": "31", "head": "1"}


class OutputError(Exception):
    """Standard output does not take what is written to it: closed, or the disk is full."""


def clean(text: str) -> str:
    """`text` without control characters, bidi overrides and other invisible instructions."""
    return text.translate(_FILTER)


class Terminal:
    """stdout for the answer alone, stderr for the rest; colour and live lines on a tty only."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.out: TextIO = sys.stdout
        self.err: TextIO = sys.stderr
        plain = os.environ.get("TERM") == "dumb"
        self.live = _is_tty(self.err) and not plain and not quiet
        self.colour = _is_tty(self.err) and not plain and not os.environ.get("NO_COLOR")
        self._status = False
        self._held = ""

    def answer(self, piece: str) -> None:
        """A piece of the answer, at once. Trailing newlines wait until more text follows."""
        self.clear_status()
        text = self._held + clean(piece)
        shown = text.rstrip("\n")
        self._held = text[len(shown) :]
        self._write(self.out, shown)

    def end_answer(self) -> None:
        """Close the answer with exactly one newline."""
        self.clear_status()
        self._held = ""
        self._write(self.out, "\n")

    def data(self, text: str) -> None:
        """A whole output that is not an answer (a table, JSON), to stdout, with its newline."""
        self.clear_status()
        self._write(self.out, clean(text) + "\n")

    def say(self, text: str, style: str = "") -> None:
        """A line on stderr."""
        self.clear_status()
        line = clean(text)
        if self.live:
            line = "\n".join(_wrapped(part, _columns(self.err)) for part in line.split("\n"))
        if style and self.colour:
            line = f"\x1b[{_STYLES[style]}m{line}\x1b[0m"
        self._write(self.err, line + "\n")

    def note(self, text: str, style: str = "dim") -> None:
        """A line on stderr that --quiet silences."""
        if not self.quiet:
            self.say(text, style)

    def warn(self, text: str) -> None:
        """A warning, one line; --quiet silences it here, the turn record keeps it."""
        self.note(f"! {text}", "warn")

    def fail(self, message: str, hint: str = "") -> None:
        """An error, one line and a hint; never silenced."""
        self.say(f"error: {message}", "bad")
        if hint:
            self.say(f"  {hint}")

    def status(self, text: str) -> None:
        """Replace the live line; nothing at all where there is no terminal."""
        if self.live:
            width = _columns(self.err)
            self._write(self.err, f"\r\x1b[K{clean(text)[: width - 1]}")
            self._status = True

    def clear_status(self) -> None:
        """Take the live line away."""
        if self._status:
            self._status = False
            self._write(self.err, "\r\x1b[K")

    def _write(self, stream: TextIO, text: str) -> None:
        encoding = stream.encoding or "utf-8"
        try:
            text.encode(encoding)
        except UnicodeEncodeError:
            # An ASCII terminal: our own signs get plain ones, the rest stays readable as escapes.
            plain = text.translate(_ASCII).encode(encoding, "backslashreplace")
            text = plain.decode(encoding)
        try:
            stream.write(text)
            stream.flush()
        except BrokenPipeError:
            if stream is self.out:
                raise
            hush()
        except OSError as error:
            hush()
            # Messages that nobody can read are no reason to lose the answer.
            if stream is self.out:
                raise OutputError(f"cannot write the output: {error.strerror}") from None


def open_streams() -> None:
    """Give a process that was started with closed standard streams working ones.

    A closed stdin reads as empty and a closed stderr swallows; a closed stdout refuses, so that an
    answer never seems written. Opened in this order they also get the numbers 0, 1 and 2, which a
    model file must not.
    """
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY))
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def hush() -> None:
    """Point what cannot be written of stdout and stderr at nothing, so that exit stays quiet."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
            continue
        with contextlib.suppress(OSError, ValueError):
            os.dup2(null, stream.fileno())
    os.close(null)


def _is_tty(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def _wrapped(line: str, width: int) -> str:
    """`line` broken between words, because a terminal breaks inside them."""
    if len(line) <= width:
        return line
    margin = " " * (len(line) - len(line.lstrip()) + 2)
    return "\n".join(
        textwrap.wrap(
            line, width, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False
        )
    )


def _columns(stream: TextIO) -> int:
    """What the user set, else what the terminal says, else 80; never so few that nothing fits."""
    try:
        width = int(os.environ.get("COLUMNS", "0"))
        width = width or os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        width = 0
    return max(width or 80, 20)
