"""The only module that writes to the terminal: answers go to stdout, everything else to stderr, all
of it filtered.

Model output, documents, file names and library messages are not trusted: an escape sequence in them
could set the window's title, fill the clipboard or hide text, and rich lets it through. So all text
goes through `text.clean`.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, TextIO

from minikv.cli.screen.keyboard import Keyboard, resuming, unechoed
from minikv.cli.screen.text import DROPPED, cells, clean, encodable, fitting, folded, letters
from minikv.errors import UsageError

if TYPE_CHECKING:
    from minikv.cli.screen.markdown import Answer

BLOCKS = " ▁▂▃▄▅▆▇█"
"""The characters of a strip, from zero to the largest value."""
FRAME = 0.1
"""Seconds between two frames of a live line."""
_NAMED = re.compile(r" *\S+(?: \S+)*? {2,}")  # a row's first cell with the gap after it
_STYLES = {"dim": "2", "warn": "33", "bad": "31", "head": "1"}


class OutputError(Exception):
    """Standard output cannot be written: it is closed, or the disk is full."""


@dataclass(frozen=True, slots=True)
class Screen:
    """What a terminal can show: how many columns, whether colours, and how many rows (0: no limit,
    as in a file)."""

    width: int = 80
    colour: bool = False
    rows: int = 0


class Terminal:
    """Writes the answer to stdout and everything else to stderr. Only a terminal gets colours, live
    lines and formatted Markdown. `plain`: no escape sequences.
    `records`: stdout gets a JSON record per turn instead of the answer. `warned`: the warnings
    since the last record. `thoughts`: how those of a reasoning model are shown
    (`minikv.cli.screen.progress`). `chat`: messages name what to type in a chat, not flags.
    `clock`: gives seconds; only when a live line is written depends on it."""

    def __init__(self, *, quiet: bool = False, plain: bool = False) -> None:
        self.quiet = quiet
        self.out: TextIO = sys.stdout
        self.err: TextIO = sys.stderr
        self.records = False
        self.warned: list[str] = []
        self.thoughts = "fold"
        self.chat = False
        self.plain = plain or os.environ.get("TERM", "dumb") == "dumb"
        self.live = _is_tty(self.err) and not self.plain and not quiet
        self.colour = _is_tty(self.err) and not self.plain and not os.environ.get("NO_COLOR")
        self.keyboard: Keyboard | None = None
        self.clock = monotonic
        self._status, self._drawn = False, 0.0  # whether there is a live line, and since when
        self._answer: Answer | None = None  # only on a terminal
        self._held = ""  # newlines at the end of the answer so far

    @property
    def screen(self) -> Screen:
        """What stderr can show now."""
        width, rows = window(self.err)
        return Screen(width, self.colour, rows if _is_tty(self.err) else 0)

    @property
    def columns(self) -> int:
        """The columns of stdout; 0 if it is not a terminal."""
        return window(self.out)[0] if _is_tty(self.out) else 0

    def open_keyboard(self) -> None:
        """Until `close`, keep keys that are typed while no prompt is shown, and do not show them. A
        plain terminal does that itself."""
        if not self.plain and _is_tty(self.err):
            self.keyboard = Keyboard(sys.stdin, self.err)
            self.keyboard.open()

    def close(self) -> None:
        """Restore the terminal: remove the live line, and restore its handling of keys."""
        self.clear_status()
        if self.keyboard is not None:
            self.keyboard.close()
            self.keyboard = None

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """A context for an answer. On a terminal its Markdown is shown with styles. Keys are not
        echoed, because that would move the text; they are kept for the next prompt."""
        if self.plain or not _is_tty(self.out):
            with self.silent():
                yield
            return
        from minikv.cli.screen.markdown import Answer  # with rich and a parser

        colour = not os.environ.get("NO_COLOR")
        self._answer = answer = Answer(lambda: window(self.out), colour=colour)
        try:
            with unechoed(self.out), resuming(answer.disturb):
                yield
        finally:
            self.clear_status()
            self._answer = None

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """A context for work that shows a live line, which is removed at the end. Keys are not
        echoed."""
        try:
            with unechoed(self.err) if self.live else contextlib.nullcontext():
                yield
        finally:
            self.clear_status()

    def answer(self, piece: str) -> None:
        """Write a piece of the answer at once. Newlines at its end wait until more text follows."""
        self.clear_status()
        text = self._passed(piece)
        if self._answer is not None:
            shown = self._answer.push(text)
        else:
            text = self._held + text
            shown = text.rstrip("\n")
            self._held = text[len(shown) :]
        self._write(self.out, shown)

    def resume_answer(self, text: str) -> None:
        """Call before the pieces of an answer that continues after `text`. With Markdown, the line
        that was not complete is written again."""
        if self._answer is not None:
            self.clear_status()
            self._write(self.out, self._answer.resume(self._passed(text)))

    def end_answer(self) -> None:
        """End the answer with exactly one newline."""
        self.clear_status()
        self._held = ""
        self._write(self.out, "\n" if self._answer is None else self._answer.finish())

    def _passed(self, text: str) -> str:
        return encodable(clean(text), _encoding(self.out))

    def data(self, text: str, *, fold: bool = False) -> None:
        """Write output that is not an answer (a table, JSON) to stdout, with a newline. fold: break
        its lines between words if stdout is a terminal."""
        self.clear_status()
        text = clean(text)
        self._write(self.out, (_folded(text, self.out) if fold else text) + "\n")

    def say(self, text: str, style: str = "") -> None:
        """A line on stderr."""
        self.clear_status()
        if self._answer is not None:
            self._answer.disturb()
        self._write(self.err, self._styled(self.set(text), style) + "\n")

    def set(self, text: str) -> str:
        """`text` as a message shows it: filtered, and broken into lines that fit on a terminal."""
        return _folded(clean(text), self.err)

    def words(self, text: str) -> str:
        """`text`, with its remedies in Python replaced by what to type here."""
        if "`" not in text:
            return text
        from minikv.cli.settings.config import worded  # knows all settings

        return worded(text, chat=self.chat)

    def note(self, text: str, style: str = "dim") -> None:
        """A line on stderr, unless --quiet silences it."""
        if not self.quiet:
            self.say(text, style)

    def warn(self, text: str) -> None:
        """A warning in one line, with remedies as in `words`. --quiet silences it, but the record
        of the turn still has it."""
        text = self.words(text)
        self.warned.append(text)
        self.note(f"! {text}", "warn")

    def fail(self, message: str, hint: str = "") -> None:
        """An error, one line and a hint; never silenced."""
        self.say(f"error: {message}", "bad")
        if hint:
            self.say(f"  {hint}")

    def copy(self, text: str) -> bool:
        """Ask the terminal to put text in the clipboard (OSC 52). False if there is no terminal
        that takes escape sequences. The terminal does not report whether it complied."""
        if self.plain or not _is_tty(self.err):
            return False
        data = base64.b64encode(text.translate(DROPPED).encode()).decode()
        self._write(self.err, f"\x1b]52;c;{data}\x07")
        return True

    def confirmed(self, question: str, *, yes: bool) -> bool:
        """Ask whether something may be removed; only "y" and "yes" mean yes. yes: do not ask.
        Raises UsageError if standard input is not a terminal."""
        if yes:
            return True
        if not (_is_tty(sys.stdin) and _is_tty(self.err)):
            raise UsageError("cannot ask: no terminal to answer on", "--yes removes without asking")
        self._write(self.err, f"{clean(question)} [y/N] ")
        try:
            return input().strip().lower() in ("y", "yes")
        except EOFError:
            self.say("")
            return False

    def page(self, lines: Iterable[str]) -> None:
        """Write coloured lines to stderr without filtering them: all text in them must have gone
        through `clean`."""
        self.clear_status()
        self._write(self.err, "".join(f"{line}\n" for line in lines))

    def think(self, text: str) -> None:
        """Write text to stderr without a newline, dimmed."""
        self.clear_status()
        self._write(self.err, self._styled(clean(text), "dim"))

    def _styled(self, text: str, style: str) -> str:
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if style and text and self.colour else text

    def status(self, text: str, style: str = "") -> None:
        """Replace the live line. Does nothing without a terminal."""
        if self.live:
            line = "".join(fitting(letters(self.writable(text)), window(self.err)[0] - 1))
            self._write(self.err, f"\r\x1b[K{self._styled(line, style)}")
            self._status, self._drawn = True, self.clock()

    def frame(self, drawn: Callable[[], str], style: str = "") -> None:
        """Replace the live line, but at most ten times a second."""
        if self.live and not (self._status and self.clock() - self._drawn < FRAME):
            self.status(drawn(), style)

    def clear_status(self) -> None:
        """Remove the live line."""
        if self._status:
            self._status = False
            self._write(self.err, "\r\x1b[K")

    def writable(self, text: str) -> str:
        """`text`, filtered and in an encoding that stderr can show."""
        return encodable(clean(text), _encoding(self.err))

    def _write(self, stream: TextIO, text: str) -> None:
        try:
            stream.write(encodable(text, _encoding(stream)))
            stream.flush()
        except BrokenPipeError:
            if stream is self.out:
                raise
            hush()
        except OSError as error:
            hush()
            # If messages cannot be written, the answer must still be.
            if stream is self.out:
                raise OutputError(f"cannot write the output: {error.strerror}") from None


# -- streams --------------------------------------------------------------------------------------


def open_streams() -> None:
    """Open standard streams that were closed when the process started.

    A closed stdin reads as empty, and a closed stderr discards everything. A closed stdout raises
    an error, so that no answer is lost silently. Opened in this order, they get the numbers 0, 1
    and 2, which a model file might get otherwise.
    """
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY))
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def hush() -> None:
    """Point stdout and stderr at /dev/null if they cannot be written, to avoid an error at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
            continue
        with contextlib.suppress(OSError, ValueError):
            os.dup2(null, stream.fileno())
    os.close(null)


def window(stream: TextIO) -> tuple[int, int]:
    """Columns (at least 20) and rows of a terminal. COLUMNS can make it narrower, and is used if
    the terminal does not tell its size."""
    try:
        width, rows = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        width = rows = 0
    told = os.environ.get("COLUMNS", "")
    columns = int(told) if told.isdecimal() else 0
    width = min(width or columns, columns or width) or 80
    return max(width, 20), rows or 24


def _is_tty(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def _encoding(stream: TextIO) -> str:
    return stream.encoding or "utf-8"  # a stream in memory has none


def _folded(text: str, stream: TextIO) -> str:
    """`text` in lines that fit on the terminal of `stream`, if it is one."""
    return in_columns(text, window(stream)[0]) if _is_tty(stream) else text


def in_columns(text: str, width: int) -> str:
    """The lines of `text`, broken between words. If a line begins with a name in a narrow column,
    or with blanks in place of one, its further rows are indented to the second column."""
    lines = []
    for line in text.split("\n"):
        name = _NAMED.match(line)
        column = cells(name[0]) if name else width
        blanks = len(line) - len(line.lstrip())
        margin = column if column <= width // 3 else blanks if blanks >= 4 else blanks + 2
        long = cells(line) > width
        lines += folded(line, width, " " * margin, whole=True) if long else [line]
    return "\n".join(lines)
