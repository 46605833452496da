"""A copy of a chat is the chat; a turn can be taken back, and an answer continued."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from lettered import lettered
from refusals import refused
from small_chat import chat, held_of, reported, say
from test_session import check, make

import minikv
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.chat.transcript import TokenLog


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


def test_a_snapshot_without_a_cache_is_read_again_with_the_next_question() -> None:
    session, plain = chat("full"), chat("full")
    session.attach("A mill stands by the river. " * 4, "mill.txt")
    say(session, "Who?")
    snapshot = session.snapshot()
    plain.restore(replace(snapshot, held=None, said=replace(snapshot.said, log=TokenLog())))
    assert plain.fed == []
    assert len(plain.turns) == 1
    say(plain, "Why?")
    say(session, "Why?")
    # The whole conversation was read at once, the unread end of the first answer included.
    assert plain.template.opening(plain.messages[:3]) == plain.fed[:-7]
    assert plain.reports[1].tokens.prompt_new > session.reports[1].tokens.prompt_new
    assert plain.reports[1].tokens.prompt_reused == 0


def test_a_lost_cache_is_not_cut_but_read_again() -> None:
    """By `undo`, and by `follow` of earlier turns."""
    sessions = [lettered(EvictionConfig.read("full")) for _ in range(3)]
    fresh, undone, followed = sessions
    for session in (undone, followed):
        say(session, "Who?")
        say(session, "Why?")
        session.engine.kv.discard()
        session.guard.change(lambda: None)
    fresh.follow(undone.messages[:2])
    undone.undo()
    followed.follow(followed.messages[:2])
    answers = [say(session, "And?") for session in sessions]
    assert answers == answers[:1] * 3


def test_undo_says_what_it_cannot_do() -> None:
    session = chat()
    refused("no turn to undo", session.undo)
    for i in range(5):
        say(session, f"question {i}")
    fed = list(session.fed)
    refused("1 or more", session.undo, 0)
    refused("this chat has 5 turns", session.undo, 6)
    assert session.fed == fed
    assert len(session.turns) == 5


TEXT = "a story of a crane and a tiger, told twice. " * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("tiny"))


def real(folder: Path, **given: Any) -> ChatSession:
    usual = {"policy": "adakv", "budget": 48, "dtype": "float32", "device": "cpu"}
    made = minikv.load(str(folder), **usual | given)
    made.undo_turns = 4
    made.attach(TEXT, "story.txt")
    return made


def figures(chat: ChatSession) -> dict[str, Any]:
    """The record without what is measured."""
    record = asdict(reported(chat))
    for name in ("time_s", "rate", "device_mem"):
        del record[name]
    for name in ("allocated", "peak_prefill"):  # room was made for another length
        del record["kv_bytes"][name]
    return record


@pytest.mark.parametrize(
    ("given", "temperature"),
    [
        ({}, 0.8),
        ({"policy": "full", "decode": "none"}, 0.0),
        ({"policy": "roco", "stride": 16}, 0.8),
        ({"kv": "int8"}, 0.0),
    ],
    ids=str,
)
def test_tokens_cache_and_record_are_those_of_a_longer_answer(
    folder: Path, given: dict[str, Any], temperature: float
) -> None:
    one, parts = real(folder, **given), real(folder, **given)
    for each in (one, parts):
        "".join(each.ask("what is in it?", 3, temperature))
    whole = "".join(one.ask("and then?", 40, temperature))
    said = "".join(parts.ask("and then?", 7, temperature))
    for more in (1, 12, 20):
        said += "".join(parts.continue_answer(more, temperature))
    assert parts.turns[-1].answer == one.turns[-1].answer == whole
    for name in ("fed", "pending_token", "messages"):
        assert getattr(parts, name) == getattr(one, name)
    assert figures(parts) == figures(one)
    assert len(parts.turns) == parts.turn == 2
    assert parts.curve[-1][:2] == one.curve[-1][:2]
    assert len(parts.curve) == len(one.curve)
    assert held_of(parts) == held_of(one)
    assert "".join(parts.ask("why?", 9)) == "".join(one.ask("why?", 9))


def test_the_record_adds_up_what_the_parts_took() -> None:
    chat = make()
    "".join(chat.ask("tell me", max_tokens=5))
    first = reported(chat)
    "".join(chat.continue_answer(max_tokens=4))
    second = reported(chat)
    assert second.tokens.generated == 9
    assert second.sampling["max_tokens"] == 9
    assert second.time_s.total > first.time_s.total
    assert second.time_s.decode > first.time_s.decode
    assert second.time_s.first_token == first.time_s.first_token
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
    def stays(says: str, chat: ChatSession, *tokens: int) -> None:
        refused(says, lambda: list(chat.continue_answer(*tokens)))

    chat = make()
    stays("no answer to continue", chat)
    whole = "".join(chat.ask("tell me"))
    stays("the model ended its answer", chat)
    list(chat.ask("again", stop=[*"abcdefghijklmnopqrstuvwxyz"]))
    stays("a stop text", chat)
    assert chat.turns[0].answer == whole
    short = make(max_context=20)
    list(short.ask("tell me all", max_tokens=256))
    assert reported(short).stop_reason == "context"
    stays("context is full", short)
    other = real(folder)
    list(other.ask("what is in it?", 5))
    other.configure(EvictionConfig.read("snapkv", budget="48"))
    fed, turns = list(other.fed), list(other.turns)
    stays("policy or the budget has changed", other)
    assert (other.fed, other.turns) == (fed, turns)
    stays("at least 1", other, 0)
