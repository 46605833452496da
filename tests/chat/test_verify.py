"""`verify`: the last answer from all that was read, where the two differ, in a chat that stays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from refusals import failing, refused
from small_chat import chat, held_of, reported, say, talked, verified
from tiers import MILL, recalling
from twins import contents

from minikv.chat.recall import Recall
from minikv.chat.report import AgainstFull
from minikv.chat.session import ChatSession
from minikv.chat.transcript import TokenLog
from minikv.engine.sampling import Sampling, pick
from minikv.errors import UsageError


def asked(*questions: str, tokens: int = 12, temperature: float = 0.7, **given: Any) -> ChatSession:
    session = talked(recalling(**given), MILL)
    for question in questions:
        list(session.ask(question, tokens, temperature))
    return session


def state(session: ChatSession) -> tuple[Any, ...]:
    """All that a chat is made of, bit by bit, but for what is known of the last answer."""
    arena, tier = session.engine.kv.arena, session.recall.tier
    rows = [
        {name: column.tolist() for name, column in tier.rows.read(i, tier.length).items()}
        for i in range(2)
    ]
    report = replace(reported(session), against_full=AgainstFull())
    talk = (list(session.fed), session.pending_token, list(session.messages), report)
    return contents(arena), str(rows), tier.length, session.recall.tokens, held_of(session), talk


def full_answer(session: ChatSession, tokens: int, temperature: float) -> list[int]:
    """What a cache without eviction answers to the same tokens."""
    report = reported(session)
    read = report.tokens.prompt_reused + report.tokens.prompt_new
    other = chat(policy="full")
    how, found = Sampling(temperature), []
    logits = other.engine.prompt(session.fed[:read])
    for i in range(tokens):
        found.append(pick(logits, session.tokenizer.vocab, how, 0, read + i, other.engine.kv.ops))
        logits = other.engine.step(found[-1])
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("questions", [("Who?",), ("Who?", "Why?", "And?")])
def test_it_is_what_a_full_cache_answers(questions: tuple[str, ...], temperature: float) -> None:
    """And the chat stays as it was, and answers the next question as one that was not verified."""
    session, plain = (asked(*questions, temperature=temperature) for _ in range(2))
    before = state(session)
    text = "".join(session.verify())
    found, report = session.verified, reported(session)
    assert list(found.tokens) == full_answer(session, 12, temperature)[: len(found.tokens)]
    assert (found.text, found.complete) == (text, True)
    mine = session.log.ids[-report.tokens.generated :]
    same = [a == b for a, b in zip(mine, found.tokens, strict=False)]
    assert found.same == (same.index(False) if False in same else len(same))
    assert found.differs == (False in same or len(found.tokens) != len(mine))
    if found.differs and found.same < min(len(mine), len(found.tokens)):
        assert found.was == session.tokenizer.decode([mine[found.same]])
        assert found.now == session.tokenizer.decode([found.tokens[found.same]])
    assert state(session) == before
    tokens = found.same if found.differs else None
    assert report.against_full == AgainstFull(not found.differs, True, tokens)
    assert session.turns[-1].report is report is session.reports[-1]
    assert {one.against_full for one in session.reports[:-1]} <= {AgainstFull()}
    assert say(session, "Why?") == say(plain, "Why?")
    assert held_of(session) == held_of(plain)


def test_both_ends_are_seen() -> None:
    """Under this budget the random network's answer differs; with room for all of it, it does
    not."""
    differs, same = asked("Who?"), asked("Who?", budget=1000)
    assert verified(differs).differs
    found = verified(same)
    assert (found.differs, found.same, found.was, found.now) == (False, 12, None, None)
    words = [reported(session).against_full.words for session in (differs, same)]
    assert words == ["differs from the full cache after 1 token", "as without eviction (checked)"]


def test_a_stop_in_the_middle_and_an_error_leave_the_chat_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = asked("Who?", budget=1000)
    before = state(session)
    list(session.verify(progress=lambda done, total: session.cancel() if done == 3 else None))
    found = session.verified
    assert (found.complete, found.differs, found.same) == (False, False, 3)
    assert not reported(session).against_full.checked
    assert state(session) == before
    pieces = session.verify()
    next(pieces)
    with pytest.raises(UsageError):  # it holds the chat
        session.reset()
    pieces.close()
    assert session.verified is None
    assert state(session) == before

    with monkeypatch.context() as patch:
        patch.setattr(session.engine.kv.ops, "rows_attention", failing(MemoryError()))
        with pytest.raises(MemoryError):
            list(session.verify())
    assert state(session) == before


def test_an_answer_that_ends_at_a_stop_text_or_was_continued() -> None:
    session = talked(recalling(budget=1000), MILL)
    whole = "".join(session.ask("Who?", 12, 0.7))
    session.undo()
    list(session.ask("Who?", 12, 0.7, stop=whole[4:6]))
    assert reported(session).stop_reason == "stop"
    found = verified(session)
    assert (found.differs, found.text) == (False, session.turns[-1].answer)
    session.undo()
    list(session.ask("Who?", 5, 0.7))
    list(session.continue_answer(4, 0.7))
    found = verified(session)
    assert (found.differs, found.same) == (False, 9)


def test_what_cannot_be_verified_says_why() -> None:
    """Also that a tier of int8 can."""

    def unknown(says: str, session: ChatSession) -> None:
        refused(says, lambda: list(session.verify()))

    coded = recalling(budget=1000)
    coded.recall = Recall(coded.engine.kv, "ram", "int8")
    unknown("no answer to verify", coded)
    coded.attach(MILL)
    list(coded.ask("Who?", 12, 0.7))
    assert verified(coded).complete
    plain = chat(reuse="once")
    list(plain.ask("Who?", 4))
    unknown("no tier has the text", plain)
    session, other = asked("Who?", "Why?"), recalling()
    snapshot = session.snapshot()
    other.restore(snapshot)
    unknown("no tier", other)
    bare = replace(snapshot, held=None, said=replace(snapshot.said, log=TokenLog()))
    other.restore(bare)  # as by `/load NAME --reread`
    unknown("not known until its next question", other)
    session.reset()
    list(session.ask("Else?", 4))
    session.restore(snapshot)
    unknown("no longer has its question", session)
