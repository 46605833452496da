"""Ctrl-C and SIGTERM as flags: an exception in the middle of a layer would leave the cache
inconsistent."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from time import monotonic
from types import FrameType

from minikv.errors import Interrupted

Handler = Callable[[int, FrameType | None], None]
TWICE = 2.0
"""Seconds within which a second Ctrl-C leaves at once."""


class Terminated(BaseException):
    """SIGTERM or SIGHUP came. Like KeyboardInterrupt, only the end of the program catches it."""


class Interrupts:
    """Counts Ctrl-C presses; shared between answers and the prompt line. `ended`: SIGTERM came."""

    def __init__(self) -> None:
        self._last = float("-inf")
        self._noticed = self._last
        self.ended = False

    def pressed(self) -> bool:
        """Whether Ctrl-C was pressed since the last call."""
        new = self._last > self._noticed
        self._noticed = self._last
        return new

    def forget(self) -> None:
        """Forget every earlier Ctrl-C: the next one is a first one."""
        self._last = self._noticed = float("-inf")

    def again(self) -> bool:
        """Note a Ctrl-C now; True if the one before was less than two seconds ago."""
        now = monotonic()
        twice = now - self._last < TWICE
        self._last = now
        return twice

    @contextmanager
    def stopping(
        self, cancel: Callable[[], None], end: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """Inside, the first Ctrl-C calls `cancel`, a second raises KeyboardInterrupt. SIGTERM calls
        `end` (if it is another one) and raises Terminated when all is done, a second one at once.
        """

        def handle(signum: int, frame: FrameType | None) -> None:
            if self.again():
                raise KeyboardInterrupt
            cancel()

        def finish(signum: int, frame: FrameType | None) -> None:
            if self.ended:
                raise Terminated
            self.ended = True
            (end or cancel)()

        with _handled({signal.SIGINT: handle, **dict.fromkeys(ends(), finish)}):
            try:
                yield
            except Interrupted:
                if not self.ended:
                    raise
        if self.ended:
            raise Terminated


def ends() -> tuple[int, ...]:
    """The signals that end the program: SIGTERM, and SIGHUP of a terminal that was closed, unless
    the program is to outlive it (nohup)."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return (signal.SIGTERM,)
    return signal.SIGTERM, signal.SIGHUP


def ending() -> AbstractContextManager[None]:
    """Inside, SIGTERM raises Terminated, so that what was begun is put in order."""

    def end(signum: int, frame: FrameType | None) -> None:
        raise Terminated

    return _handled(dict.fromkeys(ends(), end))


@contextmanager
def _handled(handlers: Mapping[int, Handler]) -> Iterator[None]:
    """Inside, these functions handle the signals: in the main thread, which alone may."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
