"""Chats over fakes: token log, transcript and cache positions agree after everything."""

from __future__ import annotations

from typing import Any

import pytest
import small_chat
from fakes import BOS, END, ROLES, ByteStream, ByteTokenizer, ChatML, FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st

from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.min_tokens import longest_token
from minikv.chat.session import ChatSession
from minikv.errors import ContextError, Interrupted, NumericsError, UsageError


def make(max_context: int = 4096, **given: Any) -> ChatSession:
    tokenizer = ByteTokenizer()
    template = ChatML(tokenizer, given.pop("notes", ()))
    return ChatSession(
        given.pop("engine", None) or FakeEngine(),
        tokenizer,
        template,  # type: ignore[arg-type]
        max_context=max_context,
        **given,
    )


def check(chat: ChatSession) -> None:
    """Fed tokens, what the engine took, cache positions and the transcript are one and the same."""
    assert chat.engine.fed == chat.fed  # type: ignore[attr-defined]
    assert chat.engine.kv.position == len(chat.fed)
    if not chat.fed:
        assert [m.role for m in chat.messages] in ([], ["system"])
        return
    pending_token = [] if chat.pending_token is None else [chat.pending_token]
    written = [BOS]
    for message in chat.messages:
        written += [ROLES[message.role], *message.content.encode(), END]
    assert written == [*chat.fed, *pending_token, END]


def test_turns_keep_log_transcript_and_cache_together() -> None:
    chat = make(system="be brief")
    chat.attach("a long story", "story.txt")
    first = "".join(chat.ask("who?"))
    check(chat)
    second = "".join(chat.ask("why?"))
    check(chat)
    assert len(first) == len(second) == 12
    assert first != second
    assert [m.role for m in chat.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert chat.messages[1].content == "Document: story.txt\n\na long story\n\nwho?"
    assert chat.messages[3].content == "why?"


def test_document_without_a_name_has_no_heading() -> None:
    chat = make()
    chat.attach("text")
    list(chat.ask("q"))
    assert chat.messages[0].content == "text\n\nq"


def test_the_unfed_last_token_leads_the_next_prompt() -> None:
    chat = make()
    "".join(chat.ask("one", max_tokens=5))
    assert chat.report is not None
    assert chat.report.stop_reason == "length"
    assert chat.pending_token is not None
    assert len(chat.fed) == len("one") + 4 + 4  # bos, user, end, assistant; 4 of 5 answer tokens
    check(chat)
    list(chat.ask("two"))
    check(chat)
    # A chat that had always known the cut answer would have fed the very same tokens.
    again = make()
    assert chat.fed[: len(again.template.opening(chat.messages[:3]))] == again.template.opening(
        chat.messages[:3]
    )


def test_cancel_in_an_answer_keeps_it_and_the_next_turn_follows() -> None:
    chat = make()
    pieces = []
    for piece in chat.ask("tell me"):
        pieces.append(piece)
        if len(pieces) == 3:
            chat.cancel()
    assert len(pieces) == 3
    assert chat.report is not None
    assert chat.report.stop_reason == "user"
    assert chat.messages[-1].content == "".join(pieces)
    check(chat)
    list(chat.ask("go on"))
    assert chat.report.stop_reason == "eos"
    check(chat)


def test_closing_the_iterator_is_a_cancel() -> None:
    chat = make()
    answer = chat.ask("tell me")
    first = next(answer) + next(answer)
    answer.close()  # type: ignore[attr-defined]
    assert chat.report is not None
    assert chat.report.stop_reason == "user"
    assert chat.messages[-1].content == first
    check(chat)
    list(chat.ask("and now"))
    check(chat)


def test_cancel_while_reading_rolls_back_and_the_documents_stay_pending() -> None:
    chat, twin = make(), make()
    for c in (chat, twin):
        list(c.ask("hello"))
        c.attach("x" * 40, "x.txt")
    calls = 0

    def stop_at_third(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            chat.cancel()

    messages, fed = list(chat.messages), list(chat.fed)
    with pytest.raises(Interrupted, match=r"stopped reading at 12 of \d+ tokens"):
        list(chat.ask("what is x?", progress=stop_at_third))
    assert chat.messages == messages
    assert chat.fed == fed
    assert [d.name for d in chat.pending] == ["x.txt"]
    check(chat)
    assert "".join(chat.ask("what is x?")) == "".join(twin.ask("what is x?"))
    check(chat)


def test_cancel_before_the_first_piece_stops_the_turn() -> None:
    """Ctrl-C between the question and the first look at it is not lost."""
    chat = make()
    answer = chat.ask("q")
    chat.cancel()
    with pytest.raises(Interrupted):
        list(answer)
    assert chat.messages == []
    assert len("".join(chat.ask("q"))) == 12


def test_a_cancel_is_for_the_answer_under_way() -> None:
    """Not for another one that was asked for before it, and not fewer after a reset."""
    chat = make()
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
    assert chat.report is not None
    assert chat.report.stop_reason == "user"


def test_what_is_to_go_on_is_looked_at_when_it_begins() -> None:
    chat = make()
    list(chat.ask("q", 3))
    more = chat.continue_answer(3)
    chat.reset()
    with pytest.raises(UsageError):
        list(more)


def test_cancel_outside_a_turn_does_nothing() -> None:
    chat = make()
    chat.cancel()
    assert len("".join(chat.ask("q"))) == 12


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["eos", "length", "cancel", "close", "interrupt", "nan"]),
            st.text(min_size=1, max_size=8).filter(lambda t: t.strip() and _encodable(t)),
            st.integers(1, 9),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_any_sequence_of_endings_keeps_the_invariant(
    turns: list[tuple[str, str, int, bool]],
) -> None:
    engine = FakeEngine()
    chat = make(engine=engine)
    failed: list[str] = []
    for ending, question, count, with_document in turns:
        if with_document:
            chat.attach(f"doc {question}")
        engine.nan_at = len(chat.fed) + count if ending == "nan" else None

        def progress(done: int, total: int, ending: str = ending) -> None:
            if ending == "interrupt":
                chat.cancel()

        answer = chat.ask(
            question, max_tokens=count if ending == "length" else 50, progress=progress
        )
        try:
            for number, _ in enumerate(answer, 1):
                if ending == "cancel" and number == count:
                    chat.cancel()
                if ending == "close" and number == count:
                    answer.close()  # type: ignore[attr-defined]
                    break
        except (Interrupted, NumericsError):
            failed.append(ending)
        check(chat)
    engine.nan_at = None
    assert set(failed) <= {"interrupt", "nan"}
    list(chat.ask("last"))
    check(chat)
    assert chat.pending == []


def _encodable(text: str) -> bool:
    try:
        return bool(text.encode())
    except UnicodeEncodeError:
        return False


def test_nan_in_the_prompt_leaves_the_chat_as_it_was() -> None:
    engine = FakeEngine()
    chat = make(engine=engine)
    list(chat.ask("fine"))
    before, fed = list(chat.messages), list(chat.fed)
    engine.nan_at = 0
    with pytest.raises(NumericsError):
        list(chat.ask("broken"))
    assert chat.messages == before
    assert chat.fed == fed
    check(chat)


def test_nan_in_an_answer_stops_it_and_keeps_what_was_written() -> None:
    engine = FakeEngine()
    chat = make(engine=engine)
    engine.nan_at = len("q") + 4 + 3
    pieces: list[str] = []
    with pytest.raises(NumericsError):
        pieces.extend(chat.ask("q"))
    assert len(pieces) == 3
    assert chat.report is not None
    assert chat.report.stop_reason == "error"
    assert chat.messages[-1].content == "".join(pieces)
    engine.nan_at = None
    check(chat)
    list(chat.ask("next"))
    check(chat)


def test_a_prompt_over_the_context_is_refused_with_numbers_and_nothing_is_fed() -> None:
    chat = make(max_context=64)
    chat.attach("y" * 50)
    # 52 + 6 + 4 control tokens = 62 fit and leave room for one more; 63 do not.
    with pytest.raises(ContextError, match=r"needs 64 tokens and 63 are left.* 64 positions") as e:
        list(chat.ask("question"[:8]))
    assert e.value.exit_code == 5
    assert "nothing was cut" in e.value.hint
    assert chat.fed == []
    check(chat)
    list(chat.ask("quest", max_tokens=1))
    check(chat)


def test_prompt_that_leaves_exactly_one_position_is_answered_to_the_end_of_the_context() -> None:
    chat = make(max_context=20)
    pieces = list(chat.ask("q" * 13))  # 13 + 4 = 17 fed; 3 positions left
    assert chat.report is not None
    assert chat.report.stop_reason == "context"
    assert len(chat.fed) == 20
    assert len("".join(pieces)) == 4  # the fourth is pending_token: no position is left to feed it
    check(chat)
    with pytest.raises(ContextError, match="used by this chat"):
        list(chat.ask("more"))
    check(chat)


def test_ten_megabytes_are_refused_before_tokenizing() -> None:
    chat = make(max_context=4096)
    chat.attach("word " * 2_000_000)
    longest_token(chat.tokenizer)
    tokenizer = chat.tokenizer
    before = tokenizer.encoded  # type: ignore[attr-defined]
    with pytest.raises(ContextError, match=r"needs at least [\d,]+ tokens"):
        list(chat.ask("q"))
    assert tokenizer.encoded - before < 1000  # type: ignore[attr-defined]
    assert len(chat.pending) == 1


def test_warnings_come_before_the_answer_and_stay_in_the_record() -> None:
    engine = FakeEngine()
    chat = make(engine=engine, notes=("no chat template: plain completion",))
    chat.attach("a <end> b <end>", "d.txt")
    order: list[str] = []
    for piece in chat.ask("q <end>", notice=order.append):
        order.append(f"piece {piece}")
    assert chat.report is not None
    warnings = chat.report.warnings
    assert order[: len(warnings)] == list(warnings)
    assert warnings[0] == "no chat template: plain completion"
    assert warnings[1].startswith("2 strings in d.txt look like control tokens")
    assert warnings[2].startswith("1 string in the question looks like a control token")
    assert len(warnings) == 3  # that a short document fits the default budget is no surprise
    engine.kv.shaped = True
    list(chat.ask("second"))
    assert chat.report.shaped_by_turn == 2
    assert chat.report.warnings == ()  # notes are said once, and no document was new
    list(chat.ask("third"))
    assert chat.report.warnings == ()  # the line under the answer says it
    assert chat.report.shaped_by_turn == chat.report.misses == 2


def test_a_budget_that_was_chosen_and_evicts_nothing_is_said() -> None:
    chat = make(eviction=EvictionConfig.read(budget=600))
    chat.engine.kv.budget_rows = 600  # type: ignore[misc]
    chat.attach("short")
    list(chat.ask("q"))
    assert chat.report is not None
    assert '`budget="600"` (600 tokens per head) is not below this' in chat.report.warnings[0]


def test_no_warning_about_the_budget_when_something_was_evicted() -> None:
    engine = FakeEngine()
    engine.kv.budget_rows = 8
    chat = make(engine=engine)
    chat.attach("longer than eight rows")
    list(chat.ask("q"))
    assert chat.report is not None
    assert chat.report.warnings == ()


def test_reset_forgets_and_clear_keeps_the_documents() -> None:
    chat, fresh = make(system="s"), make(system="s")
    chat.attach("doc", "d")
    list(chat.ask("a"))
    chat.reset(keep_documents=True)
    assert [d.name for d in chat.pending] == ["d"]
    assert chat.report is None
    check(chat)
    fresh.attach("doc", "d")
    assert "".join(chat.ask("b")) == "".join(fresh.ask("b"))
    chat.reset()
    assert chat.pending == []
    check(chat)


def test_configure_checks_before_it_changes_anything() -> None:
    chat = make()
    chat.configure(EvictionConfig.read("full"))
    assert chat.eviction.policy == "full"
    assert chat.engine.kv.configured[-1][2] is None  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="smallest useful"):
        chat.configure(EvictionConfig.read("streaming", budget=5))
    assert chat.eviction.policy == "full"


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"question": "  "}, "question is empty"),
        ({"question": "q", "max_tokens": 0}, "`max_tokens`"),
        ({"question": "q", "temperature": -1.0}, "`temperature`"),
        ({"question": "q", "temperature": float("nan")}, "`temperature`"),
        ({"question": "q", "top_p": 1.5}, "`top_p`"),
        ({"question": "q", "top_k": -1}, "between 0 and 2,147,483,648, got -1"),
        ({"question": "\udce9"}, "not valid Unicode"),
    ],
)
def test_bad_arguments_change_nothing(arguments: dict[str, Any], match: str) -> None:
    chat = make()
    with pytest.raises(UsageError, match=match):
        list(chat.ask(**arguments))
    check(chat)
    assert chat.turn == 0


@pytest.mark.parametrize("text", ["", " \n\t "])
def test_an_empty_document_is_refused(text: str) -> None:
    chat = make()
    with pytest.raises(UsageError, match=r"e\.txt is empty"):
        chat.attach(text, "e.txt")
    assert chat.pending == []


def test_a_character_over_several_tokens_arrives_whole() -> None:
    engine = FakeEngine(length=5)
    engine.script = [*"aé".encode(), 0xE2, 0x82]
    chat = make(engine=engine)
    pieces = list(chat.ask("q"))
    assert pieces == ["a", "é", "\ufffd"]  # the unfinished one is flushed at the end
    assert chat.messages[-1].content == "aé\ufffd"


def test_strings_that_pass_for_control_or_for_turn_markers_are_told_apart() -> None:
    chat = make()
    chat.attach("one <end> two", name="a.txt")
    notes: list[str] = []
    list(chat.ask("what is [USER]?", max_tokens=2, notice=notes.append))
    first, second = [n for n in notes if "string" in n]
    assert first.startswith("1 string in a.txt looks like a control token")
    assert first.endswith("read as plain text")
    assert second.startswith("1 string in the question may pass for turn markers")


def test_a_turn_is_closed_before_the_caller_hears_of_it() -> None:
    """A notice that comes during the answer, and a caller that fails on it."""
    session = make()
    session.engine.notices = []

    def fail(line: str) -> None:
        raise BrokenPipeError(line)

    answer = session.ask("who?", max_tokens=3, notice=fail)
    next(answer)
    session.engine.notices.append("steps are slower now")
    with pytest.raises(BrokenPipeError):
        list(answer)
    assert session.turn == len(session.turns) == 1
    assert session.turns[0].report.warnings == ("steps are slower now",)
    session.snapshot()
    assert "".join(session.ask("and then?", max_tokens=3))


def test_a_token_whose_text_cannot_be_had_is_not_in_the_conversation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chat = make()

    class Broken(ByteStream):
        def push(self, token: int) -> str:
            if len(chat.fed) > 12:
                raise RuntimeError("no text")
            return super().push(token)

    monkeypatch.setattr(chat.tokenizer, "stream", Broken)
    with pytest.raises(RuntimeError, match="no text"):
        list(chat.ask("q"))
    report = chat.report
    assert report is not None
    assert report.tokens.generated > 0
    assert chat.pending_token is None
    assert len(chat.tokenizer.encode(chat.turns[0].answer)) == report.tokens.generated
    check(chat)


def test_a_turn_has_its_two_points_of_the_curve_without_memory_to_count_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chat = small_chat.chat()
    list(chat.ask("one", 3))
    stats, before = chat.engine.kv.stats, len(chat.fed)

    def full() -> Any:
        if len(chat.fed) > before:
            raise MemoryError
        return stats()

    with monkeypatch.context() as patch:
        patch.setattr(chat.engine.kv, "stats", full)
        list(chat.ask("two", 3))
    assert len(chat.curve) == 4
    assert [seen for seen, *_ in chat.curve] == sorted(seen for seen, *_ in chat.curve)
