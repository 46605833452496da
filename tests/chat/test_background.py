"""`ask_async` gives the pieces of `ask`, while the event loop does other things."""

from __future__ import annotations

import asyncio
import threading

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
