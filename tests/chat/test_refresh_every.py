"""`refresh_every`: within an answer the rows are chosen anew, from all read and written so far."""

from __future__ import annotations

from typing import Any

import pytest
from small_chat import chat, held_of, reported
from tiers import MILL, recalling

from minikv.cache.tier_rows import TierError
from minikv.chat.session import ChatSession
from minikv.cli.screen import render
from minikv.engine.capture import Eager
from minikv.engine.engine import Engine
from minikv.errors import UsageError


def asked(*questions: str, tokens: int = 14, **given: Any) -> ChatSession:
    session = recalling(refresh_every=given.pop("every", 4), **given)
    session.attach(MILL)
    for question in questions:
        list(session.ask(question, tokens))
    return session


def test_the_rows_are_those_of_reading_everything_up_to_there() -> None:
    """At the last pass of the answer, and the steps after it."""
    session = asked("Who?", "Why?")
    report = reported(session)
    assert (report.refreshes, report.tokens.generated) == (3, 14)
    read = report.tokens.prompt_reused + report.tokens.prompt_new
    anew = chat()
    begins = session.reports[-2].tokens.seen_total
    logits = anew.engine.prompt(session.fed[: read + 12], turn_tokens=read + 12 - begins)
    assert session.fed[read + 12] == int(logits[: session.tokenizer.vocab].argmax())
    for token in session.fed[read + 12 :]:
        anew.engine.step(token)
    assert held_of(session) == held_of(anew)


def test_every_token_after_a_pass_is_that_of_a_full_cache() -> None:
    """With a pass for each token, the answer is a full cache's; without, it is not."""
    full = chat(policy="full")
    full.attach(MILL)
    session, plain = asked(every=1), asked(every=0)
    for question in ("Who?", "Why?"):
        whole = "".join(full.ask(question, 14))
        assert "".join(session.ask(question, 14)) == whole
    assert "".join(plain.ask("Who?", 14)) != full.turns[0].answer
    assert session.fed == full.fed
    assert [report.refreshes for report in session.reports] == [13, 13]


def test_the_record_counts_passes_and_their_time_apart_from_steps() -> None:
    session = asked("Who?")
    report = reported(session)
    assert report.refreshes == 3
    assert report.time_s.refresh > 0
    assert report.rate.decode_tok_s is not None
    steps = report.rate.decode_tok_s * report.time_s.decode
    assert steps == pytest.approx(14 - 1 - 3)
    assert "3 times within the answer" in render.stats(report)
    assert report.to_dict()["refreshes"] == 3
    assert "within the answer" not in render.stats(asked("Who?", every=0).reports[0])


def test_an_answer_that_goes_on_is_the_longer_one() -> None:
    whole, parts = asked("Who?", "Why?"), asked("Who?")
    list(parts.ask("Why?", 4))
    list(parts.continue_answer(3))
    list(parts.continue_answer(7))
    assert parts.turns[1].answer == whole.turns[1].answer
    assert parts.fed == whole.fed
    assert held_of(parts) == held_of(whole)
    assert parts.reports[1].refreshes == whole.reports[1].refreshes == 3
    parts.restore(parts.snapshot())
    other = asked()
    other.restore(parts.snapshot())  # a chat whose tier is elsewhere: it is read anew
    list(other.continue_answer(6))
    list(parts.continue_answer(6))
    assert other.fed == parts.fed


def test_steps_that_are_launched_ahead_change_nothing() -> None:
    """As on a GPU: before a pass the step after it was not launched, or is dropped."""
    plain, ahead = asked(), asked()
    ahead.engine = Engine(ahead.engine.network, ahead.engine.kv, Eager())
    for session in (plain, ahead):
        for question in ("Who?", "Why?"):
            list(session.ask(question, 14, 0.7))
            list(session.verify())
    assert ahead.fed == plain.fed
    assert held_of(ahead) == held_of(plain)
    assert [report.refreshes for report in ahead.reports] == [3, 3]
    assert ahead.verified is not None
    assert plain.verified is not None
    assert ahead.verified.tokens == plain.verified.tokens
    for one, two in zip(ahead.reports, plain.reports, strict=True):
        assert one.fidelity == two.fidelity


def verified(kind: str, **given: Any) -> ChatSession:
    """A chat of three questions, each answer verified."""
    session = asked(kind=kind, **given)
    for question in ("Who?", "Why?", "And?"):
        list(session.ask(question, 14, 0.7))
        list(session.verify())
    return session


def test_a_tier_in_a_file_is_the_same() -> None:
    one, two = (verified(kind, every=4) for kind in ("ram", "file"))
    assert two.recall.place == "file"
    assert (one.fed, held_of(one)) == (two.fed, held_of(two))
    assert [report.fidelity for report in one.reports] == [r.fidelity for r in two.reports]


def test_a_file_that_cannot_be_written_any_more_ends_the_passes_and_not_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = verified("file")
    kind, count = type(session.recall.file), 0
    commit = kind.commit

    def fails(self: Any, *given: Any) -> None:
        nonlocal count
        count += 1
        if count == 3:  # the question, then after 4 and after 8 tokens
            raise TierError("no space", None)
        commit(self, *given)

    monkeypatch.setattr(kind, "commit", fails)
    list(session.ask("More?", 14))
    report = reported(session)
    assert (report.refreshes, report.tokens.generated, report.stop_reason) == (2, 14, "length")
    rate = report.rate.decode_tok_s
    assert rate is not None
    assert round(rate * report.time_s.decode) == 14 - 1 - 2  # the third pass became a step
    assert "cannot be used any more" in report.warnings[0]
    with pytest.raises(UsageError, match="no space"):
        list(session.ask("More?", 14))
    session.refresh_every = 0
    list(session.ask("More?", 4))
