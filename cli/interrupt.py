"""Ctrl-C as a flag: an exception in the middle of a layer would leave the cache inconsistent."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType

TWICE = 2.0
"""Seconds within which a second Ctrl-C leaves at once."""


class Interrupts:
    """Counts Ctrl-C presses; shared between answers and the prompt line."""

    def __init__(self) -> None:
        self._last = float("-inf")

    def again(self) -> bool:
        """Note a Ctrl-C now; True if the one before was less than two seconds ago."""
        now = monotonic()
        twice = now - self._last < TWICE
        self._last = now
        return twice

    @contextmanager
    def stopping(self, cancel: Callable[[], None]) -> Iterator[None]:
        """Inside, the first Ctrl-C calls `cancel`, a second raises KeyboardInterrupt."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may install handlers
            return

        def handle(signum: int, frame: FrameType | None) -> None:
            if self.again():
                raise KeyboardInterrupt
            cancel()

        before = signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


@contextmanager
def held() -> Iterator[None]:
    """Inside, Ctrl-C is delayed until the end, where the system can do that."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
