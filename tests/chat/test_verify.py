"""`verify`: the last answer from all that was read, where the two part, in a chat that stays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from small_chat import chat, held_of, say
from tiers import MILL, recalling

from minikv.chat.report import AgainstFull
from minikv.chat.session import ChatSession
from minikv.errors import UsageError


def asked(*questions: str, tokens: int = 12, temperature: float = 0.7, **given: Any) -> ChatSession:
    session = recalling(**given)
    session.attach(MILL)
    for question in questions:
        list(session.ask(question, tokens, temperature))
    return session


def state(session: ChatSession) -> tuple[Any, ...]:
    """All that a chat is made of, bit by bit, but for what is known of the last answer."""
    arena, tier = session.engine.kv.arena, session.recall.tier
    assert tier is not None
    columns = [
        (name, i, h, arena.segment(name, i, h).tolist())
        for name in arena.columns
        for i in range(2)
        for h in range(2)
    ]
    rows = [
        {name: column.tolist() for name, column in tier.rows.read(i, tier.length).items()}
        for i in range(2)
    ]
    assert session.report is not None
    report = replace(session.report, against_full=AgainstFull())
    talk = (list(session.fed), session.pending_token, list(session.messages), report)
    return str(columns), str(rows), tier.length, session.recall.tokens, held_of(session), talk


def full_answer(session: ChatSession, tokens: int, temperature: float) -> list[int]:
    """What a cache without eviction answers to the same tokens."""
    report = session.report
    assert report is not None
    read = report.tokens.prompt_reused + report.tokens.prompt_new
    other = chat(policy="full")
    from minikv.engine.sampling import Sampling, pick

    how, found = Sampling(temperature), []
    logits = other.engine.prompt(session.fed[:read])
    for i in range(tokens):
        found.append(pick(logits, session.tokenizer.vocab, how, 0, read + i, other.engine.kv.ops))
        logits = other.engine.step(found[-1])
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("questions", [("Who?",), ("Who?", "Why?", "And?")])
def test_it_is_what_a_full_cache_answers(questions: tuple[str, ...], temperature: float) -> None:
    session = asked(*questions, temperature=temperature)
    before = state(session)
    text = "".join(session.verify())
    found = session.verified
    assert found is not None
    want = full_answer(session, 12, temperature)
    assert list(found.tokens) == want[: len(found.tokens)]
    assert found.text == text
    report = session.report
    assert report is not None
    pending = [] if session.pending_token is None else [session.pending_token]
    mine = [*session.fed, *pending][-report.tokens.generated :]
    same = [a == b for a, b in zip(mine, found.tokens, strict=False)]
    assert found.same == (same.index(False) if False in same else len(same))
    assert found.complete
    assert found.differs == (False in same or len(found.tokens) != len(mine))
    if found.differs and found.same < min(len(mine), len(found.tokens)):
        assert found.was == session.tokenizer.decode([mine[found.same]])
        assert found.now == session.tokenizer.decode([found.tokens[found.same]])
    assert state(session) == before
    tokens = found.same if found.differs else None
    assert session.report.against_full == AgainstFull(not found.differs, True, tokens)
    assert session.turns[-1].report is session.report is session.reports[-1]
    assert {one.against_full for one in session.reports[:-1]} <= {AgainstFull()}


def test_both_ends_are_seen() -> None:
    """Under this budget the random network's answer parts; with room for all of it, it does not."""
    parted, same = asked("Who?"), asked("Who?", budget=1000)
    for session in (parted, same):
        list(session.verify())
    assert parted.verified is not None
    assert parted.verified.differs
    assert same.verified is not None
    assert not same.verified.differs
    assert same.verified.same == 12
    assert (same.verified.was, same.verified.now) == (None, None)
    words = [session.report.against_full.words for session in (parted, same) if session.report]
    assert words == ["differs from the full cache after 1 token", "as without eviction (checked)"]


def test_the_next_answer_is_that_of_a_chat_that_was_not_verified() -> None:
    one, two = asked("Who?"), asked("Who?")
    list(one.verify())
    for question in ("Why?", "And?"):
        assert say(one, question) == say(two, question)
        list(one.verify())
    assert held_of(one) == held_of(two)


def test_a_stop_in_the_middle_and_an_error_leave_the_chat_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = asked("Who?", budget=1000)
    before = state(session)
    list(session.verify(progress=lambda done, total: session.cancel() if done == 3 else None))
    found = session.verified
    assert found is not None
    assert (found.complete, found.differs, found.same) == (False, False, 3)
    assert session.report is not None
    assert not session.report.against_full.checked
    assert state(session) == before
    pieces = session.verify()
    next(pieces)
    with pytest.raises(UsageError):  # it holds the chat
        session.reset()
    pieces.close()
    assert session.verified is None
    assert state(session) == before
    ops = session.engine.kv.ops

    def fails(*args: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(ops, "rows_attention", fails)
        with pytest.raises(MemoryError):
            list(session.verify())
    assert state(session) == before
    assert say(session, "Why?") == say(asked("Who?", budget=1000), "Why?")


def test_an_answer_that_ends_at_a_stop_text_or_was_continued() -> None:
    session = recalling(budget=1000)
    session.attach(MILL)
    whole = "".join(session.ask("Who?", 12, 0.7))
    session.undo()
    stop = whole[4:6]
    list(session.ask("Who?", 12, 0.7, stop=stop))
    assert session.report is not None
    assert session.report.stop_reason == "stop"
    list(session.verify())
    assert session.verified is not None
    assert not session.verified.differs
    assert session.verified.text == session.turns[-1].answer
    session.undo()
    list(session.ask("Who?", 5, 0.7))
    list(session.continue_answer(4, 0.7))
    list(session.verify())
    assert not session.verified.differs
    assert session.verified.same == 9


def test_after_choosing_anew_it_is_still_the_answer_from_all_that_was_read() -> None:
    session = asked("Who?", refresh_every=5)
    list(session.verify())
    assert session.verified is not None
    assert list(session.verified.tokens) == full_answer(session, 12, 0.7)


def test_int8_tiers_can_be_verified() -> None:
    session = asked("Who?", budget=1000)
    plain = session.verify
    list(plain())
    from minikv.chat.recall import Recall

    coded = recalling(budget=1000)
    coded.recall = Recall(coded.engine.kv, "ram", "int8")
    coded.attach(MILL)
    list(coded.ask("Who?", 12, 0.7))
    list(coded.verify())
    assert coded.verified is not None
    assert coded.verified.complete


def test_what_cannot_be_verified_says_why() -> None:
    session = recalling()
    with pytest.raises(UsageError, match="no answer to verify"):
        list(session.verify())
    plain = chat(reuse="once")
    list(plain.ask("Who?", 4))
    with pytest.raises(UsageError, match="no tier that has what was read"):
        list(plain.verify())
    session = asked("Who?", "Why?")
    snapshot = session.snapshot()
    other = recalling()
    other.restore(snapshot)
    with pytest.raises(UsageError, match="no tier"):
        list(other.verify())
    other.attach("Another text.")
    session.reset()
    list(session.ask("Else?", 4))
    session.restore(replace(snapshot))
    with pytest.raises(UsageError, match="not have its question any more"):
        list(session.verify())
