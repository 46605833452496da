"""One live line for everything that takes a while: a bar, amounts, a measured rate, the time left.

It is drawn on a terminal only, at most ten times a second, and taken away when the work is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic

from minikv.chat.report import size
from minikv.cli.terminal import Terminal, columns
from minikv.errors import Interrupted

FRAME = 0.1
"""Seconds between two frames."""

RECENT = 5.0
"""The rate is that of the last so many seconds: reading slows down as the prompt grows."""

_BLOCKS = ("━", "╸", " ")  # full, half, empty
_ASCII = ("=", ">", " ")
_WIDEST, _NARROWEST = 40, 6  # columns of the bar


class Live:
    """The line of one piece of work, called as `live(done, total)`.

    `unit` is "tok" or "B" (bytes, shown in binary units). `clock` gives seconds.
    """

    def __init__(
        self,
        terminal: Terminal,
        label: str,
        unit: str = "tok",
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._terminal = terminal
        self._unit = unit
        self._clock = clock
        self._signs = _BLOCKS if _draws(terminal) else _ASCII
        self._last = float("-inf")
        self.restart(label)

    def restart(self, label: str) -> None:
        """The next piece of work, on the same line and within the same rate of frames."""
        self._label = label
        self._marks: deque[tuple[float, int]] = deque()

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        # What came before the first call (a resumed download) has cost no time here.
        self._marks.append((now, done))
        while len(self._marks) > 2 and self._marks[1][0] <= now - RECENT:
            self._marks.popleft()
        if self._terminal.live and now - self._last >= FRAME:
            self._last = now
            width = columns(self._terminal.err) - 1  # the last column would wrap
            self._terminal.status(
                line(self._label, done, total, self.rate, self._unit, width, self._signs)
            )

    @property
    def rate(self) -> float | None:
        """Units per second of late; None as long as there is nothing to measure."""
        if len(self._marks) < 2:
            return None
        (began, first), (now, last) = self._marks[0], self._marks[-1]
        return (last - first) / (now - began) if now > began and last > first else None

    def finish(self) -> None:
        """Take the line away."""
        self._terminal.clear_status()


class Loading:
    """A model's way to the device, as `minikv.models.load` reports it (its `Progress`).

    After `cancel`, which a signal handler may call, the next report raises Interrupted: a download
    runs in threads, which an exception in the main thread would not stop.
    """

    def __init__(self, terminal: Terminal, *, clock: Callable[[], float] = monotonic) -> None:
        self._terminal = terminal
        self._live = Live(terminal, "", "B", clock=clock)
        self._phase = ""
        self._cancelled = False

    def planned(self, files: int, size: int, free: int | None) -> None:
        self._terminal.note(plan(files, size, free))

    def download(self, done: int, total: int) -> None:
        self._report("download", done, total)

    def weights(self, done: int, total: int) -> None:
        self._report("weights", done, total)

    def kernels(self) -> None:
        """The kernels are about to be compiled: nobody can say how far that is."""
        self._terminal.status("compiling kernels, for the first time only")

    def cancel(self) -> None:
        self._cancelled = True

    def finish(self) -> None:
        """Take the line away."""
        self._live.finish()

    def _report(self, phase: str, done: int, total: int) -> None:
        if self._cancelled:
            kept = "; finished files are kept" if phase == "download" else ""
            raise Interrupted(f"stopped at {amounts(done, total, 'B')} of the {phase}{kept}")
        if phase != self._phase:
            self._phase = phase
            self._live.restart(phase)
        self._live(done, total)


def line(
    label: str,
    done: int,
    total: int,
    rate: float | None,
    unit: str,
    width: int,
    signs: tuple[str, str, str] = _BLOCKS,
) -> str:
    """The live line, at most `width` columns: what does not fit goes, the rate first.

    reading  ━━━━━━━━━━━━━━━━━━━━━━╸━━━  4,608/7,091 tok  9,420 tok/s  0.3 s left
    """
    count = amounts(done, total, unit)
    speed = left = ""
    if rate:
        speed = f"{size(int(rate))}/s" if unit == "B" else f"{rate:,.0f} {unit}/s"
        left = f"{duration(max(total - done, 0) / rate)} left"
    share = min(max(done / total, 0.0), 1.0) if total > 0 else 0.0
    for parts in ((count, speed, left), (count, left), (count,)):
        text = "  ".join(part for part in parts if part)
        room = width - len(label) - len(text) - 4
        if room >= _NARROWEST:
            return f"{label}  {bar(share, min(room, _WIDEST), signs)}  {text}"
    return f"{label}  {count}"[:width]


def bar(share: float, width: int, signs: tuple[str, str, str] = _BLOCKS) -> str:
    """`share` (0 to 1) as `width` characters, in steps of half a character; full only at 1."""
    full, half, empty = signs
    halves = int(share * width * 2)
    drawn = full * (halves // 2) + half * (halves % 2)
    return drawn + empty * (width - len(drawn))


def amounts(done: int, total: int, unit: str) -> str:
    """ "4,608/7,091 tok", or "9.8/15.0 GiB" with both in the unit of the total."""
    if unit != "B":
        return f"{done:,}/{total:,} {unit}"
    whole = size(max(total, done))
    scale = whole.split()[-1]
    return f"{size(done, scale).removesuffix(scale).rstrip()}/{whole}"


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


def plan(files: int, total: int, free: int | None) -> str:
    """ "will download 15.0 GiB in 4 files, 212.0 GiB free"."""
    what = f"will download {size(total)} in {files:,} file{'' if files == 1 else 's'}"
    return what if free is None else f"{what}, {size(free)} free"


def _draws(terminal: Terminal) -> bool:
    """Whether the terminal's encoding has the characters of the bar."""
    try:
        "".join(_BLOCKS).encode(terminal.err.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
