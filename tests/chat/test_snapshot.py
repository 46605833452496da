"""A chat set aside and taken up again is bit for bit the one that was never set aside."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import ByteTokenizer, ChatML, FakeEngine
from small_chat import chat, held_of, say

from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.errors import Interrupted


def test_a_snapshot_of_a_chat_is_the_chat() -> None:
    session = chat(seed=5, system="be brief")
    session.attach("A mill stands by the river. " * 8, "mill.txt")
    say(session, "Who owns the mill?")
    session.attach("second text", "two.txt")
    snapshot = session.snapshot()
    want = [say(session, "Who?"), say(session, "Why?")], held_of(session)
    session.configure(EvictionConfig.read("streaming", budget=40))
    session.seed = 9
    say(session, "Something else")
    session.restore(snapshot)
    assert session.turn == len(session.turns) == len(session.reports) == 1
    assert [d.name for d in session.pending] == ["two.txt"]
    assert [d.name for d in session.documents] == ["mill.txt"]
    assert session.report is session.turns[0].report
    assert session.eviction.policy == "adakv"
    assert ([say(session, "Who?"), say(session, "Why?")], held_of(session)) == want
    session.reset()
    session.restore(snapshot)  # also where there is nothing any more, and a second time
    assert ([say(session, "Who?"), say(session, "Why?")], held_of(session)) == want


def test_turns_are_what_the_transcript_says_and_the_curve_what_was_measured() -> None:
    session = chat(system="be brief")
    session.attach("A mill stands by the river. " * 8, "mill.txt")
    session.attach("no name")
    say(session, "Who owns the mill?")
    say(session, "Why?")
    written = [message for turn in session.turns for message in turn.messages()]
    assert session.messages[1:] == written
    assert [turn.question for turn in session.turns] == ["Who owns the mill?", "Why?"]
    assert [len(turn.documents) for turn in session.turns] == [2, 0]
    assert session.reports[1] is session.report
    stats: Any = session.engine.kv.stats()
    assert len(session.curve) == 4
    assert session.curve[-1] == (stats.seen, stats.held_bytes, stats.full_bytes)
    seen, held, full = zip(*session.curve, strict=True)
    assert list(seen) == sorted(seen)
    assert max(held) < max(full)
    session.reset()
    assert (session.turns, session.reports, session.curve) == ([], [], [])


def test_a_turn_that_was_stopped_or_failed_is_in_the_list() -> None:
    engine = FakeEngine()
    tokenizer = ByteTokenizer()
    session = ChatSession(
        engine,
        tokenizer,
        ChatML(tokenizer),
        max_context=4096,  # type: ignore[arg-type]
    )
    answer = session.ask("one")
    first = next(answer)
    answer.close()  # type: ignore[attr-defined]
    engine.nan_at = len(session.fed) + 12
    with pytest.raises(Exception, match="NaN"):
        list(session.ask("two", max_tokens=50))
    assert [turn.report.stop_reason for turn in session.turns] == ["user", "error"]
    assert session.turns[0].answer == first
    session.cancel()

    def stop(done: int, total: int) -> None:
        session.cancel()

    engine.nan_at = None
    with pytest.raises(Interrupted):
        list(session.ask("three", progress=stop))
    assert len(session.turns) == session.turn == 2


def test_a_snapshot_without_a_cache_is_read_again_with_the_next_question() -> None:
    session, plain = chat("full"), chat("full")
    session.attach("A mill stands by the river. " * 4, "mill.txt")
    say(session, "Who?")
    snapshot = session.snapshot()
    again = type(snapshot)(
        None,
        snapshot.eviction,
        snapshot.seed,
        snapshot.messages,
        snapshot.documents,
        turns=snapshot.turns,
        curve=snapshot.curve,
    )
    plain.restore(again)
    assert plain.fed == []
    assert len(plain.turns) == 1
    say(plain, "Why?")
    say(session, "Why?")
    # The whole conversation was read at once, the unread end of the first answer included.
    assert plain.template.opening(plain.messages[:3]) == plain.fed[:-7]
    assert plain.reports[1].tokens.prompt_new > session.reports[1].tokens.prompt_new
    assert plain.reports[1].tokens.prompt_reused == 0
