"""SIGTERM and SIGHUP end a run as Ctrl-C does: what was measured is written first."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def caught() -> Iterator[None]:
    """Inside, the first of these signals raises KeyboardInterrupt, and later ones are ignored: they
    must not stop the writing. In a thread, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    wanted = (signal.SIGTERM, signal.SIGHUP)
    mine = [number for number in wanted if signal.getsignal(number) != signal.SIG_IGN]  # nohup
    before = {number: signal.signal(number, end) for number in mine}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
