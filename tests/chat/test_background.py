"""`ask_async` gives the pieces of `ask`, while the event loop does other things."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import partial
from inspect import signature
from typing import Any

import pytest
from small_chat import chat

from minikv.chat.session import ChatSession
from minikv.errors import UsageError

STORY = "The mill of Orlin stands by the river. " * 8


def begun() -> ChatSession:
    session = chat()
    session.attach(STORY, "story.txt")
    return session


async def wait_for(event: threading.Event) -> None:
    while not event.is_set():
        await asyncio.sleep(0.001)


def test_the_pieces_are_those_of_ask() -> None:
    alone, session = begun(), begun()
    want = list(alone.ask("Who runs it?", 12, 0.7))

    async def main() -> list[str]:
        return [piece async for piece in session.ask_async("Who runs it?", 12, 0.7)]

    assert asyncio.run(main()) == want
    assert session.turns[0].answer == alone.turns[0].answer
    assert session.fed == alone.fed


def test_the_loop_goes_on_while_a_prompt_is_read() -> None:
    """The prompt cannot be read to its end unless the loop answers from the middle of it. All
    steps are in one thread, which is not the loop's."""
    session = begun()
    reading, on = threading.Event(), threading.Event()
    threads: set[int] = set()

    def progress(done: int, total: int) -> None:
        threads.add(threading.get_ident())
        reading.set()
        assert on.wait(60), "the event loop was blocked"

    async def main() -> str:
        async def other() -> None:
            await wait_for(reading)
            on.set()

        task = asyncio.create_task(other())
        answer = "".join([p async for p in session.ask_async("Who?", 6, progress=progress)])
        await task
        return answer

    assert asyncio.run(main()) == session.turns[0].answer
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_closing_ends_the_answer() -> None:
    """As `cancel` does; the chat is free as soon as `aclose` returns."""
    session = begun()

    async def main() -> None:
        pieces = session.ask_async("Who runs it?", 200)
        await anext(pieces)
        with pytest.raises(UsageError, match="not finished"):
            session.undo()
        await pieces.aclose()
        assert session.turns[-1].report.stop_reason == "user"
        assert [p async for p in session.ask_async("And then?", 2)]

    asyncio.run(main())
    assert len(session.turns) == 2


def test_cancelling_the_task_while_the_prompt_is_read_adds_nothing() -> None:
    session = begun()
    reading = threading.Event()

    def progress(done: int, total: int) -> None:
        reading.set()

    async def ask() -> None:
        async for _ in session.ask_async("Who runs it?", 4000, progress=progress):
            pass

    async def main() -> None:
        task = asyncio.create_task(ask())
        await wait_for(reading)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        session.attach("free")  # at once

    asyncio.run(main())
    assert len(session.turns) <= 1  # 1 if all was read before the cancellation came
    list(session.ask("And then?", 2))
    assert session.turns[-1].question == "And then?"


def test_cancelling_at_once_does_not_read_the_prompt() -> None:
    """Also where the turn begins after it was told to stop, and so forgets that."""
    session = begun()
    before = list(session.pending)

    async def main() -> None:
        task = asyncio.create_task(anext(session.ask_async("Who runs it?", 4000)))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert not session.turns or session.turns[-1].report.stop_reason == "user"
    if not session.turns:
        assert session.pending == before
    assert list(session.ask("And then?", 2))


async def ask(session: ChatSession, **given: Any) -> None:
    async for _ in session.ask_async("Who runs it?", 4000, **given):
        pass


async def cancelled(session: ChatSession, times: int, moment: float, **given: Any) -> None:
    task = asyncio.create_task(ask(session, **given))
    await asyncio.sleep(moment)
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0.001)
    with contextlib.suppress(asyncio.CancelledError, RuntimeError):
        await task


async def closing(session: ChatSession) -> None:
    pieces = session.ask_async("Who runs it?", 4000)
    await anext(pieces)
    task = asyncio.create_task(pieces.aclose())  # type: ignore[arg-type]
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def left(session: ChatSession) -> None:
    """The loop ends, and cancels the task."""
    task = asyncio.create_task(ask(session))
    await asyncio.sleep(0.1)
    assert not task.done()


def no_more(done: int, total: int) -> None:
    time.sleep(0.1)
    raise RuntimeError("no more")


def slow(done: int, total: int) -> None:
    time.sleep(0.03)


@pytest.mark.parametrize(
    "end",
    [
        *(partial(cancelled, times=1, moment=moment) for moment in (0, 0.02, 0.1, 0.2)),
        *(partial(cancelled, times=4, moment=moment) for moment in (0, 0.1, 0.2)),
        partial(cancelled, times=3, moment=0.02, progress=slow),
        partial(cancelled, times=1, moment=0.05, progress=no_more),
        closing,
        left,
    ],
)
def test_a_cancelled_task_leaves_a_free_chat_and_no_traceback(
    end: Callable[[ChatSession], Coroutine[Any, Any, None]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    session = chat()
    session.attach(STORY * 4, "story.txt")
    asyncio.run(end(session))
    assert list(session.ask("And then?", 2)), "the chat is free"
    ended = [turn.report.stop_reason for turn in session.turns]
    assert ended in (["length"], ["user", "length"])
    gc.collect()
    assert told == []
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_it_says_what_it_returns() -> None:
    """To those who ask at run time; mypy sees the same."""
    given, want = signature(ChatSession.ask_async), signature(ChatSession.ask)
    assert given.parameters == want.parameters
    assert given.return_annotation == AsyncGenerator[str, None]


def test_errors_pass_through() -> None:
    session = begun()
    with pytest.raises(UsageError, match="empty"):
        session.ask_async(" ")

    def fail(done: int, total: int) -> None:
        raise RuntimeError("no more")

    async def main() -> None:
        async for _ in session.ask_async("Who?", progress=fail):
            pass

    with pytest.raises(RuntimeError, match="no more"):
        asyncio.run(main())
    assert list(session.ask("Who?", 2))
