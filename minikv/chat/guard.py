"""Ensures that a chat does one thing at a time: it writes an answer, or it is changed. Nothing
waits.

An answer holds the chat from its first piece until its iterator ends, is closed or is
garbage-collected. An iterator that was not started holds nothing. Other calls during that time,
from the same thread or another one, raise UsageError, and the answer goes on.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from minikv.chat.shown import clipped
from minikv.engine.threads import forked, refuse_fork
from minikv.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")


class Guard:
    """Records what holds a chat now. question: the question of the answer that is being written; ""
    if there is none."""

    def __init__(self) -> None:
        self.question = ""
        self._lock = threading.Lock()
        self._ending = threading.RLock()  # garbage collection may end an answer inside of `_end`
        self._pieces: Generator[str, None, None] | None = None  # of the open answer
        self._thread: int | None = None  # the thread that computes, or changes the chat
        self._free: Callable[[], None] | None = None  # set when the chat is closed

    @property
    def closed(self) -> bool:
        """Whether the chat was closed."""
        return self._free is not None

    def answer(self, pieces: Generator[str, None, None]) -> Generator[str, None, None]:
        """Yield `pieces`, and hold the chat meanwhile. Raises UsageError if it is already held."""
        self._take()
        self._pieces = pieces
        try:
            while self._pieces is pieces:  # until `finish` ends it
                with self._here():
                    piece = next(pieces, None)
                if piece is None:
                    return
                yield piece
        finally:
            self._end(pieces)

    @contextlib.contextmanager
    def change(self, *, inside: bool = False) -> Iterator[None]:
        """Hold the chat around a change. Changes may be nested. inside: also allowed as part of an
        answer, in its thread. Raises UsageError if something else holds the chat."""
        if self._thread == threading.get_ident() and (inside or self._pieces is None):
            yield
            return
        self._take()
        try:
            with self._here():
                yield
        finally:
            self._release()

    def finish(self) -> None:
        """End the open answer, if there is one, as closing its iterator does. Raises UsageError
        while another thread computes its next piece."""
        pieces = self._pieces
        if pieces is not None:
            try:
                self._end(pieces)
            except ValueError:  # its next piece is being computed
                raise self._refusal() from None

    def close(self, free: Callable[[], None]) -> None:
        """Refuse everything from now on. `free` is called at once, or, if another thread is
        computing a piece, after that."""
        self._free = free
        with contextlib.suppress(UsageError):
            self.finish()
        self._freed()

    def _end(self, pieces: Generator[str, None, None]) -> None:
        with self._ending:
            if self._pieces is not pieces or forked():
                return
            with self._here():
                pieces.close()
            self._pieces, self.question = None, ""
        self._release()

    def _take(self) -> None:
        refuse_fork()
        if self.closed:
            raise closed()
        if not self._lock.acquire(blocking=False):
            raise self._refusal()

    def _release(self) -> None:
        self._lock.release()
        self._freed()

    def _freed(self) -> None:
        if self._free is not None and self._lock.acquire(blocking=False):
            try:
                self._free()
            finally:
                self._lock.release()

    @contextlib.contextmanager
    def _here(self) -> Iterator[None]:
        refuse_fork()
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None

    def _refusal(self) -> UsageError:
        if self._pieces is None:
            return UsageError(
                "another thread is using this chat", "load a chat of its own for each thread"
            )
        to = f" to {clipped(self.question, 40)!r}" if self.question else ""
        return UsageError(
            f"the answer{to} is not finished",
            "take the rest of its pieces, close() its iterator, or call `chat.finish()`; another "
            "thread needs a chat of its own",
        )


class Guarded(Protocol):
    """An object with a guard."""

    guard: Guard


G = TypeVar("G", bound=Guarded)


def closed() -> UsageError:
    """The error of a chat that was closed."""
    return UsageError("this chat is closed", "minikv.load() makes another one")


def answers(
    method: Callable[Concatenate[G, P], Generator[str, None, None]],
) -> Callable[Concatenate[G, P], Generator[str, None, None]]:
    """Decorate a method that yields the pieces of an answer, which holds the chat."""

    @functools.wraps(method)
    def guarded(self: G, /, *given: P.args, **named: P.kwargs) -> Generator[str, None, None]:
        return self.guard.answer(method(self, *given, **named))

    return guarded


def changes(method: Callable[Concatenate[G, P], R]) -> Callable[Concatenate[G, P], R]:
    """Decorate a method that changes the chat: it is refused while something else holds the
    chat."""

    @functools.wraps(method)
    def guarded(self: G, /, *given: P.args, **named: P.kwargs) -> R:
        with self.guard.change():
            return method(self, *given, **named)

    return guarded
