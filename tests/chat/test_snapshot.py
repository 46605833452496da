"""A copy of a chat is the chat; a turn can be taken back, and an answer continued."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import small_chat
import tiny
from fakes import ByteTokenizer, ChatML, FakeEngine
from small_chat import chat, chat_over, held_of, say
from test_session import check, make

import minikv
from minikv.cache.arena import Arena
from minikv.cache.kv_cache import KVCache
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.errors import Interrupted, NumericsError, UsageError


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
    session = chat_over(
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


def figures(chat: ChatSession) -> dict[str, Any]:
    """The record without what is measured."""
    assert chat.report is not None
    record = asdict(chat.report)
    for name in ("time_s", "rate", "device_mem"):
        del record[name]
    for name in ("allocated", "peak_prefill"):  # room was made for another length
        del record["kv_bytes"][name]
    return record


def kept(chat: ChatSession) -> list[list[int]]:
    shape = chat.engine.kv.shape
    return [
        chat.kept(layer, head).tolist()
        for layer in range(shape.layers)
        for head in range(shape.kv_heads)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"decode": "none"},
        {"policy": "full", "decode": "none"},
        {"policy": "snapkv", "decode": "h2o", "kernels": "torch", "tier": "none"},
        {"policy": "full", "decode": "hashevict"},
        {"policy": "roco", "stride": 16},
        {"kv": "int8"},
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
    assert parts.fed == one.fed
    assert parts.pending_token == one.pending_token
    assert parts.turns[-1].answer == one.turns[-1].answer == whole
    assert parts.messages == one.messages
    assert figures(parts) == figures(one)
    assert len(parts.turns) == parts.turn == 2
    assert parts.curve[-1][:2] == one.curve[-1][:2]
    assert len(parts.curve) == len(one.curve)
    assert kept(parts) == kept(one)
    assert "".join(parts.ask("why?", 9)) == "".join(one.ask("why?", 9))


def test_the_pieces_read_on_within_a_character() -> None:
    """A character of which the limit cut some bytes off is shown once, when it is complete."""

    def ask(tokens: int) -> tuple[ChatSession, str]:
        session = small_chat.chat(seed=3)
        return session, "".join(session.ask("x", tokens, 1.0))

    whole, cut = ask(40), 0
    for first in range(1, 40):
        session, said = ask(first)
        ids = bytes(session._log.tokens[-first:])
        cut += said != ids.decode("utf-8", "replace")
        said += "".join(session.continue_answer(40 - first, 1.0))
        assert said == whole[1], first
        assert session.messages == whole[0].messages
    assert cut


def test_the_record_adds_up_what_the_parts_took() -> None:
    chat = make()
    "".join(chat.ask("tell me", max_tokens=5))
    first = chat.report
    "".join(chat.continue_answer(max_tokens=4))
    second = chat.report
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


def test_undo_takes_all_of_it_back_and_the_question_can_be_asked_again(folder: Path) -> None:
    chat = real(folder)
    "".join(chat.ask("what is in it?", 5))
    before = (list(chat.fed), chat.pending_token, list(chat.messages), kept(chat))
    said = "".join(chat.ask("and then?", 4)) + "".join(chat.continue_answer(6))
    taken = chat.undo()
    assert [turn.answer for turn in taken] == [said]
    assert (list(chat.fed), chat.pending_token, list(chat.messages), kept(chat)) == before
    # The answer before it had ended at its limit, too.
    first = chat.turns[-1].answer
    "".join(chat.continue_answer(3))
    assert chat.turns[-1].answer.startswith(first)
    chat.undo()
    assert chat.turns == []
    assert "".join(chat.ask("what is in it?", 5)) == first


def test_an_answer_that_the_user_stopped_goes_on(folder: Path) -> None:
    one, other = real(folder), real(folder)
    whole = "".join(one.ask("what is in it?", 12))
    answer = other.ask("what is in it?", 12)
    next(answer)
    answer.close()  # type: ignore[attr-defined]
    n = other.report.tokens.generated if other.report else 0
    "".join(other.continue_answer(12 - n))
    assert other.turns[-1].answer == whole
    assert other.fed == one.fed


def test_a_stop_text_may_begin_before_the_limit_and_end_after_it() -> None:
    whole = "".join(make().ask("tell me"))
    chat = make()
    stop = whole[3:6]
    assert "".join(chat.ask("tell me", max_tokens=5, stop=stop)) == whole[:5]
    assert "".join(chat.continue_answer(stop=stop)) == ""
    assert chat.turns[-1].answer == whole[:3]
    assert chat.report is not None
    assert chat.report.stop_reason == "stop"


def test_what_cannot_go_on_says_why_and_changes_nothing(folder: Path) -> None:
    chat = make()
    with pytest.raises(UsageError, match="no answer to go on with"):
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
    assert short.report is not None
    assert short.report.stop_reason == "context"
    with pytest.raises(UsageError, match="context is full"):
        list(short.continue_answer())
    other = real(folder)
    list(other.ask("what is in it?", 5))
    other.configure(EvictionConfig.read("snapkv", budget="48"))
    fed, turns = list(other.fed), list(other.turns)
    with pytest.raises(UsageError, match="policy or the budget was changed"):
        list(other.continue_answer())
    assert (other.fed, other.turns) == (fed, turns)
    with pytest.raises(UsageError, match="at least 1"):
        list(other.continue_answer(0))


def test_a_failure_keeps_what_was_written() -> None:
    chat = make()
    said = "".join(chat.ask("tell me", max_tokens=4))
    chat.engine.nan_at = len(chat.fed) + 3  # type: ignore[attr-defined]
    pieces: list[str] = []
    with pytest.raises(NumericsError, match="NaN"):
        pieces.extend(chat.continue_answer())
    assert chat.turns[-1].answer == said + "".join(pieces)
    assert chat.report is not None
    assert chat.report.stop_reason == "error"
    check(chat)
    chat.engine.nan_at = None  # type: ignore[attr-defined]
    said += "".join(pieces) + "".join(chat.continue_answer())
    assert said == "".join(make().ask("tell me"))
