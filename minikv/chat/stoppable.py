"""Long work in a library that does not look for Ctrl-C: tokenizing ten megabytes takes seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from minikv.errors import Interrupted

Made = TypeVar("Made")

_LOOK = 0.05  # seconds between two looks
_NAME = "minikv-stoppable"


def stoppable(work: Callable[[], Made], stopped: Callable[[], bool]) -> Made:
    """What `work` returns or raises; it runs in another thread.

    Raises Interrupted soon after `stopped` says so. The work then goes on for nothing until it
    ends, so what it changes must be right all the same.
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
    """Whether work that was left still goes on. The interpreter's end would wait for it."""
    return any(thread.name == _NAME for thread in threading.enumerate())
