"""One live line for long work: a bar, amounts, the measured rate, the time left.

Without a terminal, long work has a line when it begins.

rich.progress is not used: its Live hides the cursor, which stays hidden if the process is killed
(out of memory); its columns are cut if they do not fit, instead of left out, and they take 1.3 ms
per frame and 0.05 s to import.
"""

from __future__ import annotations

from collections import deque

from minikv.chat.report import amount, thought_for
from minikv.chat.report import size as size_of
from minikv.cli.screen.terminal import Terminal
from minikv.cli.screen.text import cells, clean, fitting, letters
from minikv.errors import Interrupted

LARGE = {"B": 256 << 20, "tok": 1_000}
"""By unit: without a terminal, a line announces work of at least this size."""
RECENT = 30.0
"""The rate is measured over this many seconds, because reading slows down as the prompt grows."""
_WIDEST, _NARROWEST = 40, 6  # columns of the bar


class Live:
    """The live line of one piece of work: call `live(done, total)` to update it.

    label: the beginning of the line. unit: "tok", "B" (bytes, shown in binary units), or any other
    word.
    """

    def __init__(self, terminal: Terminal, label: str, unit: str = "tok") -> None:
        self._terminal = terminal
        self._unit = unit
        self.restart(label)

    def restart(self, label: str, *, announced: bool = False) -> None:
        """Begin the next piece of work on the same line. announced: a note has announced it
        already."""
        self.label = label
        self._announced = announced
        # Times and amounts done. A resumed download begins with what it has.
        self._done: deque[tuple[float, int]] = deque()

    def __call__(self, done: int, total: int) -> None:
        now, first = self._terminal.clock(), not self._done
        self._done.append((now, done))
        while now - self._done[0][0] > RECENT:
            self._done.popleft()
        if self._terminal.live:
            self._terminal.frame(lambda: self._drawn(done, total))
        elif first and not self._announced and total >= LARGE.get(self._unit, total + 1):
            much = size_of(total) if self._unit == "B" else f"{total:,} tokens"
            self._terminal.note(f"{self.label}: {much}")

    def _rate(self) -> float:
        (then, before), (now, done) = self._done[0], self._done[-1]
        return (done - before) / (now - then) if now > then and done > before else 0.0

    def _drawn(self, done: int, total: int) -> str:
        """The line, without the figures that do not fit: the rate is left out first."""
        rate = self._rate()
        left = f"{duration((total - done) / rate)} left" if rate else ""
        count = amounts(done, total, self._unit)
        speed = f"{size_of(int(rate)) if self._unit == 'B' else f'{rate:,.0f} {self._unit}'}/s"
        spare = self._terminal.screen.width - 1 - len(self.label) - 4  # the last column would wrap
        for figures in ((count, speed if rate >= 1 else "", left), (count, left), (count,)):
            text = "  ".join(filter(None, figures))
            room = min(spare - len(text), _WIDEST)
            if room >= _NARROWEST:
                halves = 2 * room * min(done, total) // max(total, 1)
                bar = ("━" * (halves // 2) + "╸" * (halves % 2)).ljust(room)
                return f"{self.label}  {bar}  {text}"
        return f"{self.label}  {count}"


class Loading:
    """Shows the progress of downloading and loading a model, as the `Progress` of
    `minikv.models.load`.

    After `cancel`, which a signal handler may call, the next report raises Interrupted. An
    exception in the main thread would not stop the threads of a download.
    """

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._live = Live(terminal, "", "B")
        self._phase = ""
        self._cancelled = False

    def planned(self, files: int, size: int, free: int | None) -> None:
        what = f"will download {size_of(size)} in {amount(files, 'file')}"
        self._terminal.note(what if free is None else f"{what}, {size_of(free)} free")

    def download(self, done: int, total: int) -> None:
        self._report("download", done, total)

    def weights(self, done: int, total: int) -> None:
        self._report("weights", done, total)

    def say(self, line: str) -> None:
        self._terminal.clear_status()
        self._terminal.note(self._terminal.words(line))

    def kernels(self) -> None:
        """Say that the kernels are being compiled. How far that is cannot be known."""
        line = "compiling the C kernels, once on this machine: ten seconds to half a minute"
        if self._terminal.live:
            self._terminal.status(line)
        else:
            self._terminal.note(line)

    def cancel(self) -> None:
        self._cancelled = True

    def _report(self, phase: str, done: int, total: int) -> None:
        if self._cancelled:
            kept = "; finished files are kept" if phase == "download" else ""
            raise Interrupted(f"stopped at {amounts(done, total, 'B')} of the {phase}{kept}")
        if phase != self._phase:
            self._phase = phase
            self._live.restart(phase, announced=phase != "weights")
        self._live(done, total)


def amounts(done: int, total: int, unit: str) -> str:
    """ "4,608/7,091 tok", or "9.8/15.0 GiB" with both in the unit of the total."""
    if unit != "B":
        return f"{done:,}/{total:,} {unit}"
    whole = size_of(max(total, done))
    scale = whole.split()[-1]
    return f"{size_of(done, scale).removesuffix(scale).rstrip()}/{whole}"


def duration(seconds: float) -> str:
    """ "0.3 s", "48 s", "3 min 20 s", "1 h 05 min"; more than four days is "a long time"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 100 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return "a long time"


_LAST = 400  # the most characters of thoughts that are kept for the live line


class Thinking:
    """Shows the thoughts of one answer: call `thinking(piece, tokens)` for each piece. tokens: how
    many there are so far; 0 once `end` has told them."""

    def __init__(self, terminal: Terminal) -> None:
        self.tokens = 0
        self._terminal = terminal
        self._how = "hide" if terminal.quiet else terminal.thoughts
        self._text = ""
        if self._how == "show":
            from minikv.cli.screen.markdown import Rows  # with rich

            self._rows = Rows(terminal.screen.width - 1 if terminal.screen.rows else 1 << 30)

    def __call__(self, piece: str, tokens: int) -> None:
        self.tokens = tokens
        piece = clean(piece)
        if self._how == "show":
            text = (self._text + piece).rstrip("\n")
            self._text = (self._text + piece)[len(text) :]  # line ends wait for more text
            self._terminal.think(self._rows.write(text))
            return
        self._text = (self._text + piece)[-_LAST:]
        self._terminal.frame(self._line, "dim")

    def _line(self) -> str:
        """The live line, with as much of the end of the thoughts as fits."""
        line = f"thinking  {self.tokens:,} tok"
        room = self._terminal.screen.width - 1 - len(line) - 2
        text = " ".join(self._terminal.writable(self._text).split())
        if self._how == "hide" or not text or room < 1:
            return line
        dots = "…" * (cells(text) > room)
        end = fitting(letters(text)[::-1], room - len(dots))[::-1]
        return f"{line}  {dots}{''.join(end)}"

    def end(self) -> None:
        """Call before the answer, or when there will be none: replaces the live line by a note."""
        tokens, self.tokens = self.tokens, 0
        if not tokens:
            return
        if self._how == "show":
            self._terminal.think(self._rows.flush() + "\n")
        self._terminal.clear_status()
        if self._how != "hide":
            self._terminal.note(thought_for(tokens))
