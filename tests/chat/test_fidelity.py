"""Fidelity in the record of a turn, and the smallest budget under a bound."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from small_chat import chat, held_of, say
from tiers import MILL, RIVER, recalling

from minikv.chat.report import TurnReport
from minikv.chat.session import ChatSession
from minikv.cli import render
from minikv.cli.export.figures import rows
from minikv.errors import Interrupted, UsageError


def talked(**given: Any) -> ChatSession:
    session = recalling(**given)
    session.attach(MILL)
    for question in ("Who?", "Why?", "And the river?"):
        say(session, question)
    return session


def test_every_record_of_a_chat_with_a_tier_has_it() -> None:
    session = talked()
    for report in session.reports:
        lost = report.fidelity
        assert lost is not None
        assert lost.kl_first_token is not None
        assert lost.kl_first_token > 0
        assert 0 < lost.output_error_mean <= lost.output_error_max
        assert lost.output_error_layer in (0, 1)
        assert (lost.bound, lost.budget, lost.tried) == (None, None, None)
        assert report.time_s.fidelity > 0
        assert f"the first would be {lost.kl_first_token:.2g} nats off" in render.stats(report)
        assert "Fidelity" in dict(rows(report))
        record = json.loads(json.dumps(report.to_dict()))
        assert record["fidelity"]["kl_first_token"] == lost.kl_first_token
    plain = chat(reuse="refresh")
    plain.attach(MILL)
    say(plain, "Who?")
    assert plain.reports[0].fidelity is None
    assert "fidelity" not in render.stats(plain.reports[0])


def test_measuring_changes_no_answer_and_no_row() -> None:
    one, two = talked(), talked(fidelity=False)
    assert [turn.answer for turn in one.turns] == [turn.answer for turn in two.turns]
    assert one.fed == two.fed
    assert held_of(one) == held_of(two)
    for name, column in one.engine.kv.arena.columns.items():
        other = two.engine.kv.arena.columns[name]
        for at in ((0, 0), (0, 1), (1, 0), (1, 1)):
            mine, theirs = (each.engine.kv.arena.segment(name, *at) for each in (one, two))
            assert torch.equal(mine, theirs)
        assert column.dtype == other.dtype
    assert {report.fidelity for report in two.reports} == {None}
    assert {report.time_s.fidelity for report in two.reports} != {None}


def test_no_memory_to_measure_fails_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    session = recalling()
    session.attach(MILL)
    monkeypatch.setattr(session.engine.kv, "last_token", lambda: [][0])
    with pytest.raises(IndexError):  # only what memory and the device raise is passed over
        say(session, "Who?")

    def full() -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(session.engine.kv, "last_token", full)
    answer, _ = say(session, "Who?")
    assert answer == talked().turns[0].answer
    lost = session.reports[0].fidelity
    assert lost is not None
    assert lost.kl_first_token is None
    assert "not measured" in render.stats(session.reports[0])


def quality(bound: float, **given: Any) -> ChatSession:
    return talked(budget=given.pop("budget", 300), quality=bound, decode="roco", **given)


def losses(report: TurnReport) -> tuple[float, int, int]:
    lost = report.fidelity
    assert lost is not None
    assert lost.kl_first_token is not None
    assert lost.budget is not None
    assert lost.tried is not None
    return lost.kl_first_token, lost.budget, lost.tried


def at_budget(budget: int, turn: int, session: ChatSession) -> float:
    """The loss of a chat under this budget, for the same tokens as that turn read."""
    report = session.reports[turn]
    read = report.tokens.prompt_reused + report.tokens.prompt_new
    other = recalling(budget=budget, decode="roco")
    other.recall.ready(read)
    ids = session.fed[:read]
    begins = session.reports[turn - 1].tokens.seen_total if turn else 0
    logits = other.engine.recall(ids, begins=begins)
    found = other.engine.fidelity(ids[-1], logits, session.tokenizer.vocab)
    assert found.kl_first_token is not None
    return found.kl_first_token


def test_the_smallest_budget_under_the_bound_is_taken() -> None:
    session = quality(0.2, budget=400)
    tries = session.engine.kv.budgets(500)
    taken = set()
    for i, report in enumerate(session.reports):
        kl, budget, tried = losses(report)
        taken.add(budget)
        assert budget == tries[tried - 1]
        assert kl <= 0.2
        assert kl == pytest.approx(at_budget(budget, i, session), rel=1e-3)
        for smaller in tries[: tried - 1]:
            assert at_budget(smaller, i, session) > 0.2
        assert report.tokens.kept_mean <= budget
        assert f"budget {budget:,}" in report.lines()[1]
        assert f"{budget:,} tokens per head, the smallest budget" in render.stats(report)
    assert len(taken) == 3
    again = quality(0.2, budget=400)
    assert [losses(a) for a in again.reports] == [losses(b) for b in session.reports]
    assert again.fed == session.fed
    assert held_of(again) == held_of(session)


def test_a_looser_bound_takes_less_and_none_that_is_met_takes_all() -> None:
    loose, tight = quality(5.0), quality(1e-9, budget=100)
    assert {losses(report)[1:] for report in loose.reports} == {(37, 1)}
    for report in tight.reports:
        assert losses(report)[1] == 100
        assert "`quality=1e-09` is not met" in report.warnings[0]
        assert "not met" in render.stats(report)


@pytest.mark.parametrize("budget", ["60%", "16KiB"])
def test_a_share_or_bytes_are_the_most(budget: str) -> None:
    session = quality(1e-9, budget=budget)
    whole = talked(budget=budget, decode="roco")
    for mine, other in zip(session.reports, whole.reports, strict=True):
        assert losses(mine)[1] == round(other.tokens.kept_mean) or mine.turn > 1


def test_the_budget_is_the_users_again_without_it() -> None:
    session = quality(5.0, budget=100)
    session.quality = 0.0
    say(session, "Last?")
    report = session.reports[-1]
    assert report.fidelity is not None
    assert report.fidelity.budget is None
    assert round(report.tokens.kept_mean) == 100


@pytest.mark.parametrize("name", ["quality", "refresh_every"])
def test_without_a_tier_it_is_refused_before_anything_is_read(name: str) -> None:
    for given, why in (
        ({"reuse": "refresh"}, 'reuse="refresh"'),
        ({"kind": "none"}, 'tier="none"'),
        ({"policy": "h2o"}, "queries of all tokens"),
        ({"policy": "full"}, "nothing is evicted"),
    ):
        session = recalling(**given)
        setattr(session, name, 4)
        session.attach(RIVER)
        with pytest.raises(UsageError, match=f"`{name}=4` needs") as caught:
            list(session.ask("Who?"))
        assert why in str(caught.value)
        assert not session.fed
        assert session.pending
        setattr(session, name, 0)
        list(session.ask("Who?", 3))


def test_a_stop_in_a_later_try_leaves_all_as_it_was() -> None:
    session, plain = quality(1e-9, budget=100), quality(1e-9, budget=100)
    passes = 0

    def progress(done: int, total: int) -> None:
        nonlocal passes
        passes += done == total
        if passes == 2:
            session.cancel()

    with pytest.raises(Interrupted):
        list(session.ask("Never?", progress=progress))
    assert held_of(session) == held_of(plain)
    assert say(session, "Why not?") == say(plain, "Why not?")


def test_a_stop_in_a_later_try_leaves_the_tier_as_it_was() -> None:
    """What the first try read is in no conversation."""
    session = quality(1e-9, budget=100)
    session.reset()
    session.attach(RIVER)

    def progress(done: int, total: int) -> None:
        if done == total:
            session.cancel()

    with pytest.raises(Interrupted):
        list(session.ask("Never?", progress=progress))
    assert session.recall.tokens == 0
    assert session.engine.kv.tier is not None
    assert session.engine.kv.tier.length == 0


def test_without_memory_to_measure_no_budget_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next one would be, and the answer would be another one without an error."""
    session, plain = quality(0.2, budget=400), quality(0.2, budget=400)
    before, measure, calls = held_of(session), session.engine.kv.last_token, 0

    def full() -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise MemoryError
        return measure()

    with monkeypatch.context() as patch:
        patch.setattr(session.engine.kv, "last_token", full)
        with pytest.raises(MemoryError):
            list(session.ask("Why not?"))
    assert held_of(session) == before
    assert say(session, "Why not?") == say(plain, "Why not?")
