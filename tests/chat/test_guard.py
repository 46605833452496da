"""A chat does one thing at a time, and what is refused leaves it as it was."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from small_chat import chat, held_of

from minikv.chat.guard import Guard
from minikv.chat.session import ChatSession
from minikv.errors import UsageError

STORY = "The mill of Orlin stands by the river. " * 8
OPEN = r"^the answer to 'Who runs it\?' is not finished"


def begun() -> ChatSession:
    session = chat()
    session.attach(STORY, "story.txt")
    return session


def state(session: ChatSession) -> tuple[object, ...]:
    return list(session.fed), held_of(session), session.messages, session.pending_token


def undisturbed() -> tuple[str, str, ChatSession]:
    session = begun()
    first = "".join(session.ask("Who runs it?", 12, 0.7))
    return first, "".join(session.ask("And then?", 12, 0.7)), session


@pytest.mark.parametrize(
    "other",
    [
        lambda session: list(session.ask("And then?")),
        lambda session: next(session.ask("And then?")),
        lambda session: session.undo(),
        lambda session: session.reset(),
        lambda session: session.attach("More."),
        lambda session: session.refresh(),
        lambda session: session.snapshot(),
        lambda session: session.configure(session.eviction),
    ],
    ids=["ask", "next", "undo", "reset", "attach", "refresh", "snapshot", "configure"],
)
def test_what_comes_into_an_open_answer_is_refused(other: Callable[[ChatSession], object]) -> None:
    """With an error that names the answer and how to end it; the answer and the one after it are
    those of a chat that nothing came into."""
    first, second, alone = undisturbed()
    session = begun()
    answer = session.ask("Who runs it?", 12, 0.7)
    pieces = [next(answer)]
    with pytest.raises(UsageError, match=OPEN) as refused:
        other(session)
    assert "close() its iterator" in refused.value.hint
    assert "close() its iterator" in "".join(refused.value.__notes__), "a traceback shows it"
    assert "".join([*pieces, *answer]) == first
    assert "".join(session.ask("And then?", 12, 0.7)) == second
    assert state(session) == state(alone)


def test_another_thread_is_refused_while_the_prompt_is_read() -> None:
    """In the middle of a prompt, from a second thread; nothing waits and nothing is changed."""
    first, second, alone = undisturbed()
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

    got = "".join(session.ask("Who runs it?", 12, 0.7, progress=progress))
    assert len(errors) >= 3
    assert {str(error) for error in errors} == {"the answer to 'Who runs it?' is not finished"}
    assert got == first
    assert "".join(session.ask("And then?", 12, 0.7)) == second
    assert state(session) == state(alone)


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
    alone = begun()
    for question in questions:
        list(alone.ask(question, 3))
    assert state(session) == state(alone)


def test_a_change_that_another_thread_makes_is_named() -> None:
    guard = Guard()
    errors: list[UsageError] = []

    def intrude() -> None:
        try:
            guard.change(lambda: None)
        except UsageError as error:
            errors.append(error)

    def run() -> None:
        other = threading.Thread(target=intrude)
        other.start()
        other.join(60)

    guard.change(lambda: guard.change(run))  # a change may be made of others
    assert [str(error) for error in errors] == ["another thread is using this chat"]
    intrude()
    assert len(errors) == 1


def test_an_iterator_that_was_not_started_holds_nothing() -> None:
    session = begun()
    waiting = session.ask("Later?", 4)
    assert "".join(session.ask("Now?", 4)) is not None
    assert [turn.question for turn in session.turns] == ["Now?"]
    list(waiting)
    assert [turn.question for turn in session.turns] == ["Now?", "Later?"]


def test_an_iterator_that_is_closed_or_collected_lets_go() -> None:
    session = begun()
    answer = session.ask("Who runs it?", 12)
    next(answer)
    answer.close()
    assert session.turns[-1].report.stop_reason == "user"
    for _ in session.ask("And then?", 12):
        break  # the last reference is gone with the loop
    gc.collect()
    assert len(session.turns) == 2
    list(session.ask("At last?", 2))
    assert len(session.turns) == 3


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
    with pytest.raises(UsageError, match="And then"):
        session.undo()
    list(later)
    assert len(session.turns) == 2


def test_an_error_in_an_answer_lets_go() -> None:
    session = begun()

    def fail(done: int, total: int) -> None:
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        list(session.ask("Who runs it?", progress=fail))
    assert list(session.ask("Who runs it?", 2)) is not None
    assert len(session.turns) == 1


def test_wrong_arguments_are_told_at_the_call() -> None:
    """Not only when the first piece is taken; the chat is not held."""
    session = begun()
    for wrong in (
        lambda: session.ask(b"Who?"),  # type: ignore[arg-type]
        lambda: session.ask("Who?", max_tokens=0),
        lambda: session.ask("Who?", temperature="hot"),  # type: ignore[arg-type]
    ):
        with pytest.raises(UsageError):
            wrong()
    list(session.ask("Who?", 2))


def test_closing_gives_the_cache_back() -> None:
    session = begun()
    with session as same:
        assert same is session
        list(session.ask("Who runs it?", 4))
        kv = session.engine.kv
        assert kv.stats().allocated_bytes > 0
    assert kv.stats().allocated_bytes == 0
    assert len(session.reports) == 1
    assert repr(session).startswith("<minikv chat: closed")
    session.close()
    for use in (
        lambda: list(session.ask("And then?")),
        lambda: session.attach("More."),
        lambda: session.kept(0, 0),
        lambda: session.undo(),
        lambda: session.snapshot(),
        lambda: session.__enter__(),
    ):
        with pytest.raises(UsageError, match=r"^this chat is closed"):
            use()


def test_closing_ends_an_open_answer() -> None:
    """Also where its iterator is still there; it then has no more pieces."""
    with begun() as session:
        kv = session.engine.kv
        answer = session.ask("Who runs it?", 12)
        next(answer)
    assert kv.stats().allocated_bytes == 0
    assert session.turns[-1].report.stop_reason == "user"
    assert list(answer) == []


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


def test_pieces_come_in_order_and_once() -> None:
    def pieces() -> Iterator[str]:
        yield from ("a", "b", "c")

    assert list(Guard().answer(pieces())) == ["a", "b", "c"]  # type: ignore[arg-type]
