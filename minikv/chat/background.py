"""Computes the pieces of an answer in a thread, so that an event loop is not blocked.

One thread computes all pieces of an answer, because OpenMP keeps a pool for every thread that
computes.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
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

    returned = AsyncGenerator[str, None]
    background.__annotations__ = {**method.__annotations__, "return": returned}
    whole = inspect.signature(method).replace(return_annotation=returned)
    background.__signature__ = whole  # type: ignore[attr-defined]
    return background


class _Worker:
    """Computes the pieces in its thread. Its futures have no exception, which the event loop would
    report if nobody asked for it: `next` returns a piece or None, and the error that it raised."""

    def __init__(self, pieces: Generator[str, None, None], cancel: Callable[[], None]) -> None:
        self._pieces, self._cancel = pieces, cancel
        self._threads = ThreadPoolExecutor(1, "minikv-answer")
        self._step: Future[tuple[str | None, BaseException | None]] | None = None

    def next(self) -> Future[tuple[str | None, BaseException | None]]:
        def compute() -> tuple[str | None, BaseException | None]:
            try:
                return next(self._pieces, None), None
            except BaseException as error:
                return None, error

        self._step = self._threads.submit(compute)
        return self._step

    def end(self) -> Future[BaseException | None]:
        """End the answer behind the step under way."""

        def close() -> BaseException | None:
            try:
                self._pieces.close()
            except BaseException as error:
                return error
            return None

        ended = self._threads.submit(close)
        self._threads.shutdown(wait=False)
        return ended

    def stop(self) -> None:
        """Stop the step under way. Repeated, because a turn that begins ignores earlier calls."""
        if self._step is not None and not self._step.done():
            self._cancel()


async def _steps(
    pieces: Generator[str, None, None], cancel: Callable[[], None]
) -> AsyncGenerator[str, None]:
    worker = _Worker(pieces, cancel)
    try:
        while True:
            piece, error = await asyncio.shield(asyncio.wrap_future(worker.next()))
            if error is not None:
                raise error
            if piece is None:
                return
            yield piece
    finally:
        ended, cancelled = worker.end(), None
        while not ended.done():
            worker.stop()
            try:
                await asyncio.wait([asyncio.wrap_future(ended)], timeout=_AGAIN)
            except asyncio.CancelledError as again:  # once more: the chat must be free first
                cancelled = again
        if cancelled is not None:
            raise cancelled
        if (failed := ended.result()) is not None:
            raise failed
