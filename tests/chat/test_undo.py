"""Turns taken back: the chat is the one in which they never were."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import ByteTokenizer, ChatML, FakeEngine, FakeEngineWithMemory
from hypothesis import given, settings
from hypothesis import strategies as st
from small_chat import chat, held_of, say

from minikv.cache.arena import Arena
from minikv.cache.kv_cache import KVCache
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.chat.transcript import Turn
from minikv.errors import Interrupted, UsageError


def test_undo_and_the_same_question_give_the_same_answer() -> None:
    session = chat(undo_turns=16)
    session.attach("A mill stands by the river. " * 8, "mill.txt")
    questions = ["Who owns the mill?", "Why?", "Since when?"]
    answers, kept = [], []
    for question in questions:
        answers.append(say(session, question))
        kept.append(held_of(session))
    for back in (1, 2, 3):
        taken = session.undo(back)
        assert [turn.question for turn in taken] == questions[-back:]
        assert session.undone == taken
        assert len(session.turns) == session.turn == 3 - back
        for i in range(3 - back, 3):
            assert say(session, questions[i]) == answers[i]
            assert session.undone == []
            assert held_of(session) == kept[i]
    session.undo(3)
    assert [d.name for d in session.pending] == ["mill.txt"]
    assert session.documents == []
    assert session.report is None


def test_undo_keeps_the_settings_of_now_and_documents_that_wait() -> None:
    session = chat(undo_turns=16)
    session.attach("A mill stands by the river. " * 8, "mill.txt")
    say(session, "Who?")
    say(session, "Why?")
    session.attach("waiting", "w.txt")
    session.configure(EvictionConfig.read("streaming", budget=40))
    session.seed = 3
    session.undo(2)
    assert session.eviction.policy == "streaming"
    assert session.seed == 3
    assert [d.name for d in session.pending] == ["mill.txt", "w.txt"]
    say(session, "Who?")
    stats: Any = session.engine.kv.stats()
    assert stats.kept_max == 40


def test_undo_says_what_it_cannot_do() -> None:
    session = chat(undo_turns=2)
    with pytest.raises(UsageError, match="no turn to take back"):
        session.undo()
    for i in range(5):
        say(session, f"question {i}")
    fed = list(session.fed)
    with pytest.raises(UsageError, match="1 or more"):
        session.undo(0)
    with pytest.raises(UsageError, match="this chat has 5 turns"):
        session.undo(6)
    assert session.fed == fed
    assert len(session.turns) == 5


def test_turns_without_a_copy_are_taken_back_and_the_rest_is_read_again() -> None:
    """As after a saved chat was loaded, or with more turns than are kept."""
    session, fresh = chat(undo_turns=2), chat()
    for each in (session, fresh):
        each.attach("A mill stands by the river. " * 8, "mill.txt")
        say(each, "question 0")
        each.attach("The river is slow. " * 8, "river.txt")
        say(each, "question 1")
    for i in (2, 3, 4):
        say(session, f"question {i}")
    session.undo(3)  # there is no copy from before question 2
    assert (session.fed, session.messages) == ([], fresh.messages)
    assert [d.name for d in session.documents] == ["mill.txt", "river.txt"]
    assert session.curve == fresh.curve
    fresh.refresh()
    assert say(session, "other") == say(fresh, "other")
    assert held_of(session) == held_of(fresh)
    assert session.reports[-1].reuse == "refresh"
    session.undo(2)
    assert [d.name for d in session.pending] == ["river.txt"]
    session.undo(1)
    assert (session.fed, session.turns) == ([], [])
    assert [d.name for d in session.pending] == ["mill.txt", "river.txt"]


def test_snapshots_stay_under_their_limit_and_are_made_only_if_wanted() -> None:
    session = chat(undo_turns=16)
    say(session, "a long first question " * 5)
    one = session.snapshot().nbytes
    session.history.nbytes = 3 * one + one // 2
    for i in range(6):
        say(session, f"question {i}")
        kept = session.history.before
        assert sum(snapshot.nbytes for snapshot in kept.values()) <= session.history.nbytes
        assert 0 in kept
    assert len(kept) == 4
    session.history.nbytes = one // 2  # as with --policy full over a long document
    say(session, "more")
    assert list(session.history.before) == [0]
    plain = chat()
    say(plain, "q")
    assert plain.history.before == {}


def test_a_question_that_was_not_read_leaves_undo_as_it_was() -> None:
    session = chat(undo_turns=16)
    say(session, "one")
    session.undo()
    with pytest.raises(Interrupted):
        list(session.ask("two", progress=lambda done, total: session.cancel()))
    assert [turn.question for turn in session.undone] == ["one"]
    say(session, "two")
    session.undo()
    assert session.fed == []


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["ask", "undo", "undo2", "retry", "stop"]), max_size=9))
def test_any_undoing_and_asking_is_the_chat_without_what_was_undone(steps: list[str]) -> None:
    engine = FakeEngineWithMemory()
    tokenizer = ByteTokenizer()
    session = ChatSession(
        engine,
        tokenizer,
        ChatML(tokenizer),
        max_context=4096,
        undo_turns=16,  # type: ignore[arg-type]
    )
    asked: list[str] = []
    for i, step in enumerate(steps):
        back = {"undo": 1, "undo2": 2, "retry": 1}.get(step, 0)
        if back > len(asked):
            with pytest.raises(UsageError):
                session.undo(back)
            continue
        last = asked[-1] if asked else ""
        if back:
            session.undo(back)
            asked = asked[: len(asked) - back]
        if step == "retry":
            list(session.ask(last))
            asked.append(last)
        elif not back:
            question = f"question {i}"
            answer = session.ask(question)
            if step == "stop":
                next(answer)
                next(answer)
                answer.close()  # type: ignore[attr-defined]
                session.undo()
            else:
                list(answer)
                asked.append(question)
    straight = ChatSession(
        FakeEngine(),
        tokenizer,
        ChatML(tokenizer),
        max_context=4096,  # type: ignore[arg-type]
    )
    for question in asked:
        list(straight.ask(question))
    assert session.messages == straight.messages
    assert session.fed == straight.fed == engine.fed
    assert [turn.question for turn in session.turns] == asked
    assert all(isinstance(turn, Turn) for turn in session.turns)


def test_an_undo_for_which_there_is_no_memory_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the policy is another one now, whose columns have to be made."""
    for turns in (2, 16):  # without and with a copy of the cache
        session = chat(undo_turns=turns)
        for question in ("one", "two", "three"):
            say(session, question)
        session.configure(EvictionConfig.read("h2o", budget=40))
        before, fed = held_of(session), list(session.fed)

        def full(*args: object, **named: object) -> None:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(Arena, "declare", full)
            patch.setattr(KVCache, "_empty", full if turns == 2 else KVCache._empty)
            with pytest.raises(MemoryError):
                session.undo(3)
        assert (held_of(session), session.fed, len(session.turns)) == (before, fed, 3)
        assert session.eviction.policy == "h2o"
        session.undo(3)
        assert say(session, "one")[0]
        assert session.report is not None
        assert session.report.policy == "h2o"
