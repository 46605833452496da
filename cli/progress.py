"""One live line for work that takes a while: a bar, amounts, the measured rate, the time left.

rich.progress makes the line, `Terminal.status` writes it: on a terminal only, at most ten times a
second, and removed when the work is done. rich's own Live is not used. It hides the cursor, which
a process that is killed (out of memory) leaves hidden, and it writes past `Terminal`.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

from minikv.chat.report import size as size_of
from minikv.cli.terminal import Terminal, columns
from minikv.errors import Interrupted

if TYPE_CHECKING:
    from rich.progress import Progress

FRAME = 0.1
"""Seconds between two frames."""
RECENT = 30.0
"""The rate is that of the last so many seconds: reading slows down as the prompt grows."""
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
        self._last = float("-inf")
        self.restart(label)

    def restart(self, label: str) -> None:
        """Begin the next piece of work, on the same line."""
        self._label = label
        self._progress: Progress | None = None

    def __call__(self, done: int, total: int) -> None:
        if not self._terminal.live:
            return
        if self._progress is None:
            from rich.progress import Progress  # it is slow to import

            self._progress = Progress(
                auto_refresh=False, get_time=self._clock, speed_estimate_period=RECENT
            )
            # What was done before (of a resumed download) has taken no time here.
            self._progress.add_task(self._label, total=total, completed=done)
        task = self._progress.tasks[0]
        self._progress.update(task.id, completed=done, total=total)
        now = self._clock()
        if now - self._last >= FRAME:
            self._last = now
            rate = task.speed
            task.fields["done"] = amounts(done, total, self._unit)
            task.fields["rate"] = f" {_per_second(rate, self._unit)}" if rate else ""
            task.fields["left"] = f" {duration((total - done) / rate)} left" if rate else ""
            self._terminal.status(_drawn(self._progress, self._terminal))

    def finish(self) -> None:
        """Remove the line."""
        self._terminal.clear_status()


def _drawn(progress: Progress, terminal: Terminal) -> str:
    """The line as text. What does not fit is left out, the rate first."""
    from rich.console import Console
    from rich.progress import BarColumn

    width = columns(terminal.err) - 1  # the last column would wrap
    console = Console(
        file=terminal.err,
        width=width,
        color_system=None,
        legacy_windows=False,
        markup=False,
        emoji=False,
        highlight=False,
    )
    bar = BarColumn(_NARROWEST)
    label, done = "{task.description} ", "{task.fields[done]}"
    rate, left = "{task.fields[rate]}", "{task.fields[left]}"
    for progress.columns in (
        (label, bar, done, rate, left),
        (label, bar, done, left),
        (label, bar, done),
        (label, done),
    ):
        unlimited = console.options.update(max_width=1000)
        spare = width - console.measure(progress, options=unlimited).maximum
        if spare >= 0:
            bar.bar_width = min(_NARROWEST + spare, _WIDEST)
            break
    with console.capture() as drawn:
        console.print(progress)
    return drawn.get().rstrip()


class Loading:
    """Shows how far a model is downloaded and loaded: the `Progress` of `minikv.models.load`.

    After `cancel`, which a signal handler may call, the next report raises Interrupted. A download
    runs in threads, which an exception in the main thread would not stop.
    """

    def __init__(self, terminal: Terminal, *, clock: Callable[[], float] = monotonic) -> None:
        self._terminal = terminal
        self._live = Live(terminal, "", "B", clock=clock)
        self._phase = ""
        self._cancelled = False

    def planned(self, files: int, size: int, free: int | None) -> None:
        what = f"will download {size_of(size)} in {files:,} file{'' if files == 1 else 's'}"
        self._terminal.note(what if free is None else f"{what}, {size_of(free)} free")

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


def _per_second(rate: float, unit: str) -> str:
    return f"{size_of(int(rate))}/s" if unit == "B" else f"{rate:,.0f} {unit}/s"
