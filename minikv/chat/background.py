"""Computes the pieces of an answer in a thread, so that an event loop is not blocked.

One thread computes all pieces of an answer, because OpenMP keeps a pool for every thread that
computes.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
_AGAIN = 0.02  # seconds between two calls of `cancel`


class Cancellable(Protocol):
    """An object with a `cancel` that any thread may call."""

    def cancel(self) -> None: ...


C = TypeVar("C", bound=Cancellable)


def in_background(
    method: Callable[Concatenate[C, P], Generator[str, None, None]],
) -> Callable[Concatenate[C, P], AsyncGenerator[str, None]]:
    """Wrap a method so that `async for` gets the pieces that it yields. If the task is cancelled or
    the iterator is closed, the answer ends as with `cancel`; this waits until the chat is free."""

    @functools.wraps(method)
    def background(self: C, /, *given: P.args, **named: P.kwargs) -> AsyncGenerator[str, None]:
        return _steps(method(self, *given, **named), self.cancel)

    return background


async def _steps(
    pieces: Generator[str, None, None], cancel: Callable[[], None]
) -> AsyncGenerator[str, None]:
    loop = asyncio.get_running_loop()
    worker = ThreadPoolExecutor(1, "minikv-answer")
    step: asyncio.Future[str | None] | None = None
    try:
        while True:
            step = loop.run_in_executor(worker, next, pieces, None)
            piece = await asyncio.shield(step)
            if piece is None:
                return
            yield piece
    finally:
        try:
            while step is not None and not step.done():
                cancel()  # repeated, because a turn that begins ignores earlier calls
                await asyncio.wait([step], timeout=_AGAIN)
            await asyncio.shield(loop.run_in_executor(worker, pieces.close))
        finally:
            worker.shutdown(wait=False)
