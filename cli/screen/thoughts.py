"""The thoughts of a reasoning model on the screen, before its answer.

What was written to a terminal cannot be folded afterwards: only the live line can be replaced. So
`fold` shows the end of the thoughts there while they are written, and one line in its place when
they have ended. `show` writes all of them, which stay, and then that line. `hide` only counts on
the live line. All of it is on stderr. Without a terminal nothing is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from minikv.chat.report import thought_for
from minikv.cli.screen.progress import FRAME
from minikv.cli.screen.terminal import Terminal
from minikv.cli.screen.text import cells, clean, fitting, letters

_LAST = 400  # characters that are remembered for the live line


class Thinking:
    """The thoughts of one answer, called as `thinking(piece, tokens)` (`Say`). tokens: how many
    there are that `end` has not told yet. `clock` gives seconds; only when the live line is written
    depends on it."""

    def __init__(self, terminal: Terminal, *, clock: Callable[[], float] = monotonic) -> None:
        self.tokens = 0
        self._terminal, self._clock = terminal, clock
        self._how = "hide" if terminal.quiet else terminal.thoughts
        self._last = float("-inf")
        self._text = ""
        self._wrap, self._flush = _wrapping(terminal)

    def __call__(self, piece: str, tokens: int) -> None:
        self.tokens = tokens
        piece = clean(piece)
        if self._how == "show":
            text = (self._text + piece).rstrip("\n")
            self._text = (self._text + piece)[len(text) :]  # line ends wait for what follows
            self._terminal.think(self._wrap(text))
            return
        self._text = (self._text + piece)[-_LAST:]
        now = self._clock()
        if now - self._last >= FRAME:
            self._last = now
            self._terminal.status(self._line(), "dim")

    def _line(self) -> str:
        """The live line: as much of the end of the thoughts as fits."""
        line = f"thinking  {self.tokens:,} tok"
        room = self._terminal.screen.width - 1 - len(line) - 2
        text = " ".join(self._terminal.writable(self._text).split())
        if self._how == "hide" or not text or room < 1:
            return line
        dots = self._terminal.screen.dots if cells(text) > room else ""
        end = fitting(letters(text)[::-1], room - len(dots))[::-1]
        return f"{line}  {dots}{''.join(end)}"

    def end(self) -> None:
        """Before the answer, or once it is known that none comes: leave the one line."""
        tokens, self.tokens = self.tokens, 0
        if not tokens:
            return
        if self._how == "show":
            self._terminal.think(self._flush() + "\n")
        self._terminal.clear_status()
        if self._how != "hide":
            self._terminal.note(thought_for(tokens))


def _wrapping(terminal: Terminal) -> tuple[Callable[[str], str], Callable[[], str]]:
    """Functions that break text between words where stderr is a terminal, and that give what waits
    for the end of its word."""
    if not terminal.screen.rows:
        return str, str
    from minikv.cli.screen.markdown import Rows  # with rich

    rows = Rows(terminal.screen.width - 1)
    return rows.write, rows.flush
