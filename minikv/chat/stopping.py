"""Stopping, and one thing at a time: `Cancelling` takes requests to stop; `Guard` lets an answer or
a change hold the chat; `in_background` computes an answer in a thread; `stoppable` abandons work
that cannot be interrupted.

An answer holds the chat from its first piece until its iterator ends, is closed or is
garbage-collected. An iterator that was not started holds nothing. Other calls during that time,
from the same thread or another one, raise UsageError, and the answer continues; nothing waits.

An interrupt (Ctrl-C in a script) may come between any two instructions. So there are no locks: a
list records what holds the chat, and one assignment ends a hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from inspect import GEN_RUNNING, getgeneratorstate
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from minikv.chat.report import clipped
from minikv.engine.threads import forked, refuse_fork
from minikv.errors import Interrupted, UsageError

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="Stoppable")
Pieces = Generator[str, None, None]


class Stoppable(Protocol):
    """What the decorators below need from an object. Any thread may call `cancel`."""

    guard: Guard

    def cancel(self) -> None: ...


_AGAIN = 0.02  # seconds between two calls of `cancel`
_LOOK = 0.05  # seconds between two calls of `stopped`
_NAME = "minikv-stoppable"


class Cancelling:
    """The requests to stop. `cancel` is safe to call from a signal handler."""

    def __init__(self) -> None:
        self._calls = self._handled = 0  # calls of `cancel`, and how many of them were handled

    def cancel(self) -> None:
        """Stop the turn."""
        self._calls += 1

    def cancelled(self) -> bool:
        """Whether the turn must stop."""
        return self._calls > self._handled

    def forget(self, before: int | None = None) -> None:
        """Forget earlier calls of `cancel`; with `before`, only the first `before` calls."""
        self._handled = max(self._handled, self._calls if before is None else before)

    def during(self, pieces: Pieces) -> Pieces:
        """Return `pieces`. A call of `cancel` applies to them from now until they end, also before
        the first piece is requested."""
        calls = self._calls

        def yielded() -> Pieces:
            self.forget(calls)
            try:
                yield from pieces
            finally:
                self.forget()

        return yielded()


# -- one thing at a time -------------------------------------------------------------------------


class _Hold:
    """Something that holds a chat: an answer with these pieces, or a change by this thread
    (None)."""

    __slots__ = ("over", "pieces", "thread")

    def __init__(self, pieces: Pieces | None = None) -> None:
        self.pieces = pieces
        self.thread = threading.get_ident()
        self.over = False

    @property
    def left(self) -> bool:
        """Whether this is a change that an interrupt left unfinished: changes do not nest. An
        unfinished answer can be ended with `Guard.finish`."""
        return self.pieces is None and self.thread == threading.get_ident()

    @property
    def computing(self) -> bool:
        """Whether a piece of the answer is being computed."""
        return self.pieces is not None and getgeneratorstate(self.pieces) == GEN_RUNNING


class Guard:
    """Records what holds a chat now. settle(): a method of the chat that finishes what an interrupt
    left unfinished; called before and after each hold. question: the question of the answer that is
    being written."""

    def __init__(self, settle: Callable[[], None] | None = None) -> None:
        self.question = ""
        # Weak: the chat refers to this guard, and must be freed as soon as nobody else refers to
        # it.
        self._method = None if settle is None else weakref.WeakMethod(settle)
        self._holds: list[_Hold] = []  # the first unfinished one holds the chat
        self._free: Callable[[], None] | None = None  # set when the chat is closed

    @property
    def closed(self) -> bool:
        """Whether the chat was closed."""
        return self._free is not None

    def answer(self, pieces: Pieces) -> Pieces:
        """Yield `pieces`, and hold the chat meanwhile. Raises UsageError if it is already held."""
        hold = _Hold(pieces)

        def during() -> Pieces:
            try:
                try:
                    self._take(hold)
                    # Until the pieces end, or `finish` ends them.
                    while not hold.over and (piece := self._next(pieces)) is not None:
                        yield piece
                finally:
                    self._end(hold)
            finally:
                self._end(hold)  # an interrupt may have stopped the first call

        return during()

    def _next(self, pieces: Pieces) -> str | None:
        refuse_fork()
        return next(pieces, None)

    def change(self, work: Callable[[], R]) -> R:
        """Hold the chat around `work()`, and return what it returns. Raises UsageError if something
        else holds the chat."""
        hold = _Hold()
        try:
            try:
                self._take(hold)
                return work()
            finally:
                self._end(hold)
        finally:
            self._end(hold)

    def finish(self) -> None:
        """End the open answer, if there is one, as closing its iterator does. Raises UsageError
        while another thread computes its next piece."""
        first = self._first()
        if first is not None and first.pieces is not None:
            if first.computing:
                raise self._refusal(first)
            self._end(first)

    def close(self, free: Callable[[], None]) -> None:
        """Refuse everything from now on. `free` is called at once, or, if another thread is
        computing a piece, after that."""
        self._free = free
        with contextlib.suppress(UsageError):
            self.finish()
        self._freed()

    def _settle(self) -> None:
        settle = None if self._method is None else self._method()
        if settle is not None:
            settle()

    def _first(self) -> _Hold | None:
        return next((hold for hold in tuple(self._holds) if not hold.over), None)

    def _take(self, hold: _Hold) -> None:
        refuse_fork()
        if self.closed:
            raise closed()
        self._holds.append(hold)  # of two threads, one is first
        while (first := self._first()) is not hold:
            if first is None or not first.left:
                hold.over = True
                raise self._refusal(first)
            self._end(first)
        self._holds = [hold]  # a thread that came meanwhile is refused
        self.question = ""
        self._settle()

    def _end(self, hold: _Hold) -> None:
        if hold.over or forked():
            return
        try:
            if self._first() is hold:
                try:
                    if hold.pieces is not None:
                        hold.pieces.close()
                finally:
                    self._settle()
        finally:
            hold.over = True
        self._freed()

    def _freed(self) -> None:
        """Free the memory of a closed chat, unless something still holds it."""
        if self._free is not None and self._first() is None:
            self._free()

    def _refusal(self, first: _Hold | None) -> UsageError:
        if first is None or first.pieces is None:
            return UsageError(
                "another thread is using this chat", "load a separate chat for each thread"
            )
        to = f" to {clipped(self.question, 40)!r}" if self.question else ""
        return UsageError(
            f"the answer{to} is not finished",
            "take the rest of its pieces, close() its iterator, or call `chat.finish()`; another "
            "thread needs its own chat",
        )


def closed() -> UsageError:
    """The error of a chat that was closed."""
    return UsageError("this chat is closed", "minikv.load() makes another one")


def answers(method: Callable[Concatenate[S, P], Pieces]) -> Callable[Concatenate[S, P], Pieces]:
    """Decorate a method that yields the pieces of an answer, which holds the chat. Like `changes`,
    for methods of an object with a `guard`."""

    @functools.wraps(method)
    def guarded(self: S, /, *given: P.args, **named: P.kwargs) -> Pieces:
        return self.guard.answer(method(self, *given, **named))

    return guarded


def changes(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate a method that changes the chat: it is refused while something else holds the
    chat."""

    @functools.wraps(method)
    def guarded(self: S, /, *given: P.args, **named: P.kwargs) -> R:
        return self.guard.change(lambda: method(self, *given, **named))

    return guarded


# -- in a thread ---------------------------------------------------------------------------------


def in_background(
    method: Callable[Concatenate[S, P], Pieces],
) -> Callable[Concatenate[S, P], AsyncGenerator[str, None]]:
    """Wrap a method so that `async for` gets the pieces that it yields. A single thread computes
    them all, because OpenMP keeps a pool for every thread that computes. If the task is cancelled
    or the iterator is closed, the answer ends as with `cancel`; this waits until the chat is
    free."""

    @functools.wraps(method)
    def background(self: S, /, *given: P.args, **named: P.kwargs) -> AsyncGenerator[str, None]:
        return _steps(method(self, *given, **named), self.cancel)

    returned = AsyncGenerator[str, None]
    background.__annotations__ = {**method.__annotations__, "return": returned}
    whole = inspect.signature(method).replace(return_annotation=returned)
    background.__signature__ = whole  # type: ignore[attr-defined]
    return background


def _caught(work: Callable[..., Any], *given: object) -> tuple[Any, BaseException | None]:
    """The result of `work`, and the error that it raised. The event loop would report a future
    whose exception nobody retrieves."""
    try:
        return work(*given), None
    except BaseException as error:
        return None, error


async def _steps(pieces: Pieces, cancel: Callable[[], None]) -> AsyncGenerator[str, None]:
    threads = ThreadPoolExecutor(1, "minikv-answer")
    step: Future[Any] | None = None
    try:
        while True:
            step = threads.submit(_caught, next, pieces, None)
            piece, error = await asyncio.shield(asyncio.wrap_future(step))
            if error is not None:
                raise error
            if piece is None:
                return
            yield piece
    finally:
        ended, cancelled = threads.submit(_caught, pieces.close), None
        threads.shutdown(wait=False)
        while not ended.done():
            if step is not None and not step.done():
                cancel()  # repeatedly, because a turn that begins ignores earlier calls
            try:
                await asyncio.wait([asyncio.wrap_future(ended)], timeout=_AGAIN)
            except asyncio.CancelledError as again:  # cancelled again: the chat must be free first
                cancelled = again
        if (failed := cancelled or ended.result()[1]) is not None:
            raise failed


def stoppable(work: Callable[[], R], stopped: Callable[[], bool]) -> R:
    """Run `work` in another thread; return what it returns, or raise what it raises.

    Raises Interrupted soon after `stopped()` becomes true. The work then continues in its thread,
    and its result is not used. So its side effects must be harmless.
    """
    made: list[tuple[Any, BaseException | None]] = []
    thread = threading.Thread(target=lambda: made.append(_caught(work)), name=_NAME, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK)
        if stopped():
            raise Interrupted("stopped before anything was read", "nothing was added")
    result, error = made[0]
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def left() -> bool:
    """Whether stopped work still runs in its thread. The interpreter would wait for it at exit."""
    return any(thread.name == _NAME for thread in threading.enumerate())
