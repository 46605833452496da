"""Makes long work stoppable in a library that cannot be interrupted: tokenizing ten megabytes takes
seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from minikv.errors import Interrupted

Made = TypeVar("Made")

_LOOK = 0.05  # seconds between two calls of `stopped`
_NAME = "minikv-stoppable"


def stoppable(work: Callable[[], Made], stopped: Callable[[], bool]) -> Made:
    """Run `work` in another thread; return what it returns, or raise what it raises.

    Raises Interrupted soon after `stopped()` is true. The work is not ended then: it goes on in its
    thread, and its result is not used. So its side effects must be harmless.
    """
    made: list[Made] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            made.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name=_NAME, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK)
        if stopped():
            raise Interrupted("stopped before anything was read", "nothing was added")
    if failed:
        raise failed[0]
    return made[0]


def left() -> bool:
    """Whether stopped work still runs in its thread. The interpreter would wait for it at its
    end."""
    return any(thread.name == _NAME for thread in threading.enumerate())
