"""How a run ends that does not come to its own end: told to from outside, or out of time."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP end a run as Ctrl-C does: what was measured is written first."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may say what a signal does
        return

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one must not cut the writing short
        raise KeyboardInterrupt

    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Watch:
    """Ends the process after so many seconds, whatever it is doing: work in C, or on a GPU that
    does not answer, cannot be stopped from within. `last()` comes first and returns the status."""

    def __init__(
        self, seconds: float, last: Callable[[], int], end: Callable[[int], object] = os._exit
    ) -> None:
        self._last, self._end = last, end
        self._lock, self._closed = threading.Lock(), False
        self._timer = threading.Timer(seconds, self._ring)
        self._timer.daemon = True
        self._timer.start()

    def _ring(self) -> None:
        with self._lock:
            if self._closed:
                return
            status = 1
            try:
                status = self._last()
            finally:
                self._end(status)

    def close(self) -> None:
        """From now on nothing is ended. Waits while that is under way."""
        self._timer.cancel()
        with self._lock:
            self._closed = True
