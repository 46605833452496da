"""The one place that writes: answers to stdout, everything else to stderr, all of it filtered.

Model output, documents, file names and library messages are not trusted: an escape sequence in them
could set the window's title, fill the clipboard or hide text. rich lets escape sequences through.
So `clean` removes single characters. It does not look for sequences, because it would miss one that
is split over two tokens.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TextIO

from minikv.cli.screen.keyboard import Keyboard, unechoed
from minikv.cli.screen.tables import cells, wrapped

if TYPE_CHECKING:
    from minikv.cli.screen.markdown import Answer

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
# Signs that no one sees and that change the order or the ends of words, or are blank letters: LRM,
# RLM, ZWSP, BOM, the soft hyphen, fillers of Hangul and the like. The joiners and variation
# selectors of scripts and of emoji are none.
_UNSEEN = (
    *(0xAD, 0x34F, 0x61C, 0x17B4, 0x17B5, 0x180E, 0x200B, 0x200E, 0x200F),
    *range(0x2060, 0x2070),
    *(0x2800, 0x3164, 0xFEFF, 0xFFA0, 0xFFF9, 0xFFFA, 0xFFFB),
)
_FILTER: dict[int, str | None] = {
    **{code: f"\\u{code:04x}" for code in _UNSEEN},
    **dict.fromkeys(_DROPPED),
}
_ASCII = str.maketrans(
    {"·": "-", "›": ">", "…": "...", "×": "x", "–": "-", "—": "-", "•": "*", "│": "|", "─": "-"}
    | dict(zip("▁▂▃▄▅▆▇█", ".:-=+*#@", strict=True))
)
_NAMED = re.compile(r" *\S+(?: \S+)*? {2,}")  # a row's first cell with the gap after it
_STYLES = {"dim": "2", "warn": "33", "bad": "31", "head": "1"}


class OutputError(Exception):
    """Standard output cannot be written: it is closed, or the disk is full."""


def clean(text: str) -> str:
    """`text` without control characters and bidi overrides. Unseen signs are \\u escapes."""
    return text.translate(_FILTER)


class Terminal:
    """Writes the answer to stdout and everything else to stderr. Colour, live lines and Markdown
    only on a terminal. `plain`: no escape sequences. `ascii`: stderr can write only ASCII.
    `records`: stdout gets a JSON record per turn instead of the answer."""

    def __init__(self, *, quiet: bool = False, plain: bool = False) -> None:
        self.quiet = quiet
        self.out: TextIO = sys.stdout
        self.err: TextIO = sys.stderr
        self.records = False
        self.plain = plain or os.environ.get("TERM", "dumb") == "dumb"
        self.live = _is_tty(self.err) and not self.plain and not quiet
        self.colour = _is_tty(self.err) and not self.plain and not os.environ.get("NO_COLOR")
        self.ascii = self._encodable(self.err, "›•│─█") != "›•│─█"
        self.keyboard: Keyboard | None = None
        self._status = False
        self._held = ""
        self._markdown: Answer | None = None

    def open_keyboard(self) -> None:
        """Until `close`, keep what is typed while no prompt is shown, without showing it."""
        editor = not self.plain and _is_tty(self.err)
        self.keyboard = Keyboard(sys.stdin, self.err, editor=editor)
        self.keyboard.open()

    def close(self) -> None:
        """Restore the terminal: remove the live line, and restore its handling of keys."""
        self.clear_status()
        if self.keyboard is not None:
            self.keyboard.close()
            self.keyboard = None

    def anew(self) -> contextlib.AbstractContextManager[None]:
        """Around a question of minikv: what was typed before does not answer it, and is kept."""
        return self.keyboard.anew() if self.keyboard else contextlib.nullcontext()

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Around an answer. On a terminal its Markdown is shown with styles. Keys are not echoed,
        because that would move the text; they are kept for the next prompt."""
        if self.plain or not _is_tty(self.out):
            with self.silent():
                yield
            return
        from minikv.cli.screen.markdown import Answer  # with rich and a parser

        self._markdown = Answer(
            lambda: window(self.out),
            colour=not os.environ.get("NO_COLOR"),
            ascii=self._encodable(self.out, "•│─") != "•│─",
        )
        try:
            with unechoed(self.out, self._markdown.disturb):
                yield
        finally:
            self._markdown = None

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Around work that shows a live line: keys are not echoed."""
        with unechoed(self.err, lambda: None) if self.live else contextlib.nullcontext():
            yield

    def answer(self, piece: str) -> None:
        """Write a piece of the answer at once; newlines at its end only once more text follows."""
        self.clear_status()
        if self._markdown is not None:
            self._write(self.out, self._markdown.push(self._encodable(self.out, clean(piece))))
            return
        text = self._held + clean(piece)
        shown = text.rstrip("\n")
        self._held = text[len(shown) :]
        self._write(self.out, shown)

    def resume_answer(self, text: str) -> None:
        """Call before the pieces of an answer that continues after `text`. With Markdown, the block
        that was not complete is written again."""
        if self._markdown is not None:
            self._write(self.out, self._markdown.resume(self._encodable(self.out, clean(text))))

    def end_answer(self) -> None:
        """End the answer with exactly one newline."""
        self.clear_status()
        self._held = ""
        self._write(self.out, "\n" if self._markdown is None else self._markdown.finish())

    def data(self, text: str) -> None:
        """Write an output that is not an answer (a table, JSON) to stdout, with a newline."""
        self.clear_status()
        self._write(self.out, clean(text) + "\n")

    def say(self, text: str, style: str = "") -> None:
        """A line on stderr."""
        self.clear_status()
        if self._markdown is not None:
            self._markdown.disturb()
        line = clean(text)
        if _is_tty(self.err):
            line = "\n".join(_wrapped(part, columns(self.err)) for part in line.split("\n"))
        if style and self.colour:
            line = f"\x1b[{_STYLES[style]}m{line}\x1b[0m"
        self._write(self.err, line + "\n")

    def note(self, text: str, style: str = "dim") -> None:
        """A line on stderr that --quiet silences."""
        if not self.quiet:
            self.say(text, style)

    def warn(self, text: str) -> None:
        """A warning, one line. --quiet silences it, but not in the record of the turn."""
        self.note(f"! {text}", "warn")

    def fail(self, message: str, hint: str = "") -> None:
        """An error, one line and a hint; never silenced."""
        self.say(f"error: {message}", "bad")
        if hint:
            self.say(f"  {hint}")

    def copy(self, text: str) -> bool:
        """Ask the terminal to put text in the clipboard (OSC 52). False if there is no terminal
        that takes escape sequences. The terminal does not say whether it complied."""
        if self.plain or not _is_tty(self.err):
            return False
        kept = text.translate(dict.fromkeys(_DROPPED))
        data = base64.b64encode(kept.encode()).decode()
        self._write(self.err, f"\x1b]52;c;{data}\x07")
        return True

    def page(self, lines: Iterable[str]) -> None:
        """Write lines to stderr as they are, with colours. The caller must have passed all text in
        them through `clean`."""
        self.clear_status()
        self._write(self.err, "".join(f"{line}\n" for line in lines))

    def status(self, text: str) -> None:
        """Replace the live line. Without a terminal this does nothing."""
        if self.live:
            width = columns(self.err)
            self._write(self.err, f"\r\x1b[K{_cut(clean(text), width - 1)}")
            self._status = True

    def clear_status(self) -> None:
        """Remove the live line."""
        if self._status:
            self._status = False
            self._write(self.err, "\r\x1b[K")

    def writable(self, text: str) -> str:
        """`text` as stderr can show it, filtered."""
        return self._encodable(self.err, clean(text))

    def _encodable(self, stream: TextIO, text: str) -> str:
        encoding = stream.encoding or "utf-8"
        try:
            text.encode(encoding)
        except UnicodeEncodeError:
            # minikv's own signs have ASCII forms; the rest is written as \u escapes.
            plain = text.translate(_ASCII).encode(encoding, "backslashreplace")
            return plain.decode(encoding)
        return text

    def _write(self, stream: TextIO, text: str) -> None:
        try:
            stream.write(self._encodable(stream, text))
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


def open_streams() -> None:
    """Give a process that was started with closed standard streams working ones.

    A closed stdin reads as empty, a closed stderr discards everything. A closed stdout gives an
    error, so that no answer is lost silently. Opened in this order, they get the numbers 0, 1 and
    2, which a model file could get otherwise.
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


def _is_tty(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def _cut(text: str, width: int) -> str:
    """As much of `text` as fits."""
    if text.isascii():
        return text[:width]
    from rich.cells import set_cell_size

    return set_cell_size(text, min(width, cells(text)))


def _wrapped(line: str, width: int) -> str:
    """`line`, broken between words. If it begins with a name in a narrow column, the following
    lines are indented to the second column."""
    if cells(line) <= width:
        return line
    name = _NAMED.match(line)
    column = cells(name[0]) if name else width
    margin = " " * (column if column <= width // 3 else len(line) - len(line.lstrip()) + 2)
    return "\n".join(wrapped(line, width, margin))


def window(stream: TextIO) -> tuple[int, int]:
    """Columns (at least 20) and rows of a terminal. COLUMNS can make it narrower. COLUMNS and LINES
    are used if the terminal does not tell its size."""
    try:
        width, rows = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        width = rows = 0
    told = _number("COLUMNS")
    width = min(width or told, told or width) or 80
    return max(width, 20), rows or _number("LINES") or 24


def columns(stream: TextIO) -> int:
    """The columns of `window`."""
    return window(stream)[0]


def _number(variable: str) -> int:
    try:
        return max(0, int(os.environ.get(variable, "0")))
    except ValueError:
        return 0
