"""A chat does one thing at a time, can be stopped at any time, and continues afterwards."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from inspect import signature
from operator import methodcaller
from typing import Any

import pytest
from refusals import failing, refused
from small_chat import chat, held_of, reported
from test_session import make

from minikv.chat.session import ChatSession
from minikv.chat.stopping import Guard, left, stoppable
from minikv.errors import Interrupted, UsageError


def test_a_cancel_is_for_the_answer_under_way() -> None:
    """Also before its first piece; not for another one that was asked for before it, and not fewer
    after a reset."""
    chat = make()
    chat.cancel()
    asked = chat.ask("q")
    chat.cancel()
    with pytest.raises(Interrupted):
        list(asked)
    assert chat.messages == []
    one, other = chat.ask("q"), chat.ask("q")
    next(one)
    chat.cancel()
    list(one)
    assert len("".join(other)) == 12
    for _ in range(3):
        chat.cancel()
    late = chat.ask("q")
    chat.reset()
    next(late)
    chat.cancel()
    assert list(late) == []
    assert reported(chat).stop_reason == "user"


STORY = "The mill of Orlin stands by the river. " * 8
OPEN = r"^the answer to 'Who runs it\?' is not finished"


def begun() -> ChatSession:
    session = chat()
    session.attach(STORY, "story.txt")
    return session


def as_alone(session: ChatSession, *asked: tuple[Any, ...]) -> None:
    """The chat is one that was asked this and nothing else."""
    alone = begun()
    for question in asked:
        list(alone.ask(*question))
    assert [turn.answer for turn in session.turns] == [turn.answer for turn in alone.turns]
    for name in ("fed", "messages", "pending_token"):
        assert getattr(session, name) == getattr(alone, name)
    assert held_of(session) == held_of(alone)


TWO = (("Who runs it?", 12, 0.7), ("And then?", 12, 0.7))


OTHERS: dict[str, Callable[[ChatSession], object]] = {
    "ask": lambda session: list(session.ask("And then?")),
    "next": lambda session: next(session.ask("And then?")),
    **{name: methodcaller(name) for name in ("undo", "reset", "refresh", "snapshot")},
    "attach": lambda session: session.attach("More."),
    "configure": lambda session: session.configure(session.eviction),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_what_comes_into_an_open_answer_is_refused(other: Callable[[ChatSession], object]) -> None:
    """With an error that names the answer and how to end it; the answer and the one after it are
    those of a chat that nothing came into."""
    session = begun()
    answer = session.ask(*TWO[0])
    pieces = [next(answer)]
    error = refused(OPEN, other, session)
    assert "close() its iterator" in error.hint
    assert "close() its iterator" in "".join(error.__notes__), "a traceback shows it"
    assert "".join([*pieces, *answer]) == session.turns[0].answer
    list(session.ask(*TWO[1]))
    as_alone(session, *TWO)


def test_another_thread_is_refused_while_the_prompt_is_read() -> None:
    """In the middle of a prompt, from a second thread; nothing waits and nothing is changed."""
    session = begun()
    errors: list[UsageError] = []

    def intrude() -> None:
        for what in (lambda: list(session.ask("And then?")), session.undo, session.reset):
            try:
                what()
            except UsageError as error:
                errors.append(error)

    def progress(done: int, total: int) -> None:
        if done < total:
            other = threading.Thread(target=intrude)
            other.start()
            other.join(60)
            assert not other.is_alive()

    list(session.ask(*TWO[0], progress=progress))
    assert len(errors) >= 3
    assert {str(error) for error in errors} == {"the answer to 'Who runs it?' is not finished"}
    list(session.ask(*TWO[1]))
    as_alone(session, *TWO)


def test_two_threads_that_ask_at_once() -> None:
    """Again and again: one of them gets its answer, the other an error, and the transcript is that
    of the questions that were answered."""
    session = begun()
    answered: list[str] = []
    refused: list[str] = []
    together = threading.Barrier(2)

    def ask(name: str) -> None:
        for number in range(6):
            question = f"{name}{number}?"
            together.wait(60)
            try:
                list(session.ask(question, 3))
            except UsageError as error:
                refused.append(str(error))
            else:
                answered.append(question)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=ask, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    finally:
        sys.setswitchinterval(before)
    assert len(answered) + len(refused) == 12
    assert answered
    assert all("not finished" in text or "another thread" in text for text in refused)
    questions = [turn.question for turn in session.turns]
    assert sorted(questions) == sorted(answered)
    as_alone(session, *((question, 3) for question in questions))


def test_a_change_that_another_thread_makes_is_named() -> None:
    guard = Guard()

    def run() -> None:
        with ThreadPoolExecutor() as other:
            says = r"^another thread is using this chat\n"
            other.submit(refused, says, guard.change, lambda: None).result(60)

    guard.change(lambda: guard.change(run))  # a change may be made of others
    guard.change(lambda: None)


def test_an_iterator_holds_nothing_before_its_start_nor_when_it_is_closed_or_collected() -> None:
    session = begun()
    waiting = session.ask("Later?", 4)
    list(session.ask("Now?", 4))
    assert [turn.question for turn in session.turns] == ["Now?"]
    list(waiting)
    assert [turn.question for turn in session.turns] == ["Now?", "Later?"]
    answer = session.ask("Who runs it?", 12)
    next(answer)
    answer.close()
    assert session.turns[-1].report.stop_reason == "user"
    for _ in session.ask("And then?", 12):
        break  # the last reference is gone with the loop
    gc.collect()
    assert len(session.turns) == 4
    list(session.ask("At last?", 2))
    assert len(session.turns) == 5


def test_an_answer_can_be_finished_without_its_iterator() -> None:
    """As in a notebook, whose last traceback still holds the iterator. What is left of it has no
    pieces, and does not come between later answers."""
    session = begun()
    lost = session.ask("Who runs it?", 12)
    next(lost)
    session.finish()
    session.finish()
    assert session.turns[-1].report.stop_reason == "user"
    later = session.ask("And then?", 12)
    next(later)
    assert list(lost) == []
    lost.close()
    refused("And then", session.undo)
    list(later)
    assert len(session.turns) == 2


def test_closing_gives_the_cache_back() -> None:
    session = begun()
    with session as same:
        assert same is session
        list(session.ask("Who runs it?", 4))
        kv, answer = session.engine.kv, session.ask("And then?", 12)
        next(answer)
        assert kv.stats().allocated_bytes > 0
    assert kv.stats().allocated_bytes == 0
    assert session.reports[1].stop_reason == "user"
    assert list(answer) == []
    assert repr(session).startswith("<minikv chat: closed")
    session.close()
    for use in (OTHERS["ask"], OTHERS["attach"], OTHERS["undo"], OTHERS["snapshot"]):
        refused(r"^this chat is closed", use, session)
    refused(r"^this chat is closed", session.kept, 0, 0)
    refused(r"^this chat is closed", session.__enter__)


def test_closing_while_another_thread_reads() -> None:
    """The other thread's question ends, and the memory is given back then."""
    session = begun()
    kv = session.engine.kv
    closing = threading.Thread(target=session.close)

    def progress(done: int, total: int) -> None:
        if not closing.ident:
            closing.start()
            closing.join(60)

    with pytest.raises(Exception, match="stopped"):
        list(session.ask("Who runs it?", 12, progress=progress))
    assert not closing.is_alive()
    assert kv.stats().allocated_bytes == 0
    assert session.guard.closed


async def wait_for(event: threading.Event) -> None:
    while not event.is_set():
        await asyncio.sleep(0.001)


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


async def loop_ends(session: ChatSession) -> None:
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
        loop_ends,
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
    "".join(session.ask("And then?", 2))  # the chat is free
    first, last = [turn.report.stop_reason for turn in session.turns][:-1], session.turns[-1]
    assert first in ([], ["user"])
    if isinstance(end, partial) and "progress" in end.keywords:
        assert first == []  # it was stopped while the prompt was read, which takes longer
    assert last.question == "And then?"
    assert last.report.stop_reason in ("length", "eos")  # it depends on where the first was stopped
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
    refused("empty", session.ask_async, " ")
    with pytest.raises(RuntimeError, match="no more"):
        asyncio.run(ask(session, progress=failing(RuntimeError("no more"))))

    async def pieces() -> list[str]:
        return [piece async for piece in session.ask_async(*TWO[0])]

    assert asyncio.run(pieces()) == list(begun().ask(*TWO[0]))
    as_alone(session, TWO[0])


def test_work_that_does_not_end_is_left() -> None:
    assert stoppable(lambda: 3, lambda: False) == 3
    with pytest.raises(ZeroDivisionError):
        stoppable(lambda: 1 // 0, lambda: False)
    never = threading.Event()
    with pytest.raises(Interrupted) as caught:
        stoppable(never.wait, lambda: True)
    assert caught.value.exit_code == 130
    assert left()
    never.set()
    for thread in threading.enumerate():
        if thread.name == "minikv-stoppable":
            thread.join(10)
    assert not left()


def test_the_program_does_not_wait_for_what_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own end took seconds more."""
    from minikv.cli import main

    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: ended.append(-1))
    main._exit_if_threads_remain(130)
    assert ended == []
    never = threading.Event()
    with pytest.raises(Interrupted):
        stoppable(never.wait, lambda: True)
    main._exit_if_threads_remain(130)
    assert ended == [-1, 130]
    never.set()
