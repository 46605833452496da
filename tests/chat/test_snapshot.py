"""A copy of a chat is the chat; a turn can be taken back, and an answer continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from lettered import lettered
from small_chat import chat, reported, say
from test_session import check, make

import minikv
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.errors import UsageError


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


def test_undo_says_what_it_cannot_do() -> None:
    session = chat()
    with pytest.raises(UsageError, match="no turn to undo"):
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


TEXT = "a story of a crane and a tiger, told twice. " * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("tiny"))


def real(folder: Path, **given: Any) -> ChatSession:
    made = minikv.load(
        str(folder),
        **{"policy": "adakv", "budget": 48, "dtype": "float32", "device": "cpu"} | given,
    )
    made.undo_turns = 4
    made.attach(TEXT, "story.txt")
    return made


def test_the_record_adds_up_what_the_parts_took() -> None:
    chat = make()
    "".join(chat.ask("tell me", max_tokens=5))
    first = reported(chat)
    "".join(chat.continue_answer(max_tokens=4))
    second = reported(chat)
    assert first is not None
    assert second is not None
    assert second.tokens.generated == 9
    assert second.sampling["max_tokens"] == 9
    assert second.time_s.total > first.time_s.total
    assert second.time_s.decode > first.time_s.decode
    assert second.time_s.first_token == first.time_s.first_token
    assert second.rate.decode_tok_s is not None
    assert second.rate.decode_tok_s * second.time_s.decode == pytest.approx(8)
    check(chat)


def test_a_stop_text_may_begin_before_the_limit_and_end_after_it() -> None:
    whole = "".join(make().ask("tell me"))
    chat = make()
    stop = whole[3:6]
    assert "".join(chat.ask("tell me", max_tokens=5, stop=stop)) == whole[:5]
    assert "".join(chat.continue_answer(stop=stop)) == ""
    assert chat.turns[-1].answer == whole[:3]
    assert reported(chat).stop_reason == "stop"


def test_what_cannot_go_on_says_why_and_changes_nothing(folder: Path) -> None:
    chat = make()
    with pytest.raises(UsageError, match="no answer to continue"):
        list(chat.continue_answer())
    whole = "".join(chat.ask("tell me"))
    with pytest.raises(UsageError, match="the model ended its answer"):
        list(chat.continue_answer())
    list(chat.ask("again", stop=["a", "e", "i", *"bcdfgh", *"jklmnopqrstuvwxyz"]))
    with pytest.raises(UsageError, match="a stop text"):
        list(chat.continue_answer())
    assert chat.turns[0].answer == whole
    short = make(max_context=20)
    list(short.ask("tell me all", max_tokens=256))
    assert reported(short).stop_reason == "context"
    with pytest.raises(UsageError, match="context is full"):
        list(short.continue_answer())
    other = real(folder)
    list(other.ask("what is in it?", 5))
    other.configure(EvictionConfig.read("snapkv", budget="48"))
    fed, turns = list(other.fed), list(other.turns)
    with pytest.raises(UsageError, match="policy or the budget has changed"):
        list(other.continue_answer())
    assert (other.fed, other.turns) == (fed, turns)
    with pytest.raises(UsageError, match="at least 1"):
        list(other.continue_answer(0))


def test_a_lost_cache_is_not_cut_but_read_again() -> None:
    """By `undo`, and by `follow` of earlier turns."""
    sessions = [lettered(EvictionConfig.read("full")) for _ in range(3)]
    fresh, undone, followed = sessions
    for session in (undone, followed):
        say(session, "Who?")
        say(session, "Why?")
        session.engine.kv.drop()
        session.guard.change(lambda: None)
    fresh.follow(undone.messages[:2])
    undone.undo()
    followed.follow(followed.messages[:2])
    answers = [say(session, "And?") for session in sessions]
    assert answers == answers[:1] * 3
