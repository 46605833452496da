"""Fidelity in the record of a turn."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from refusals import failing
from small_chat import chat, held_of, say, talked
from tiers import MILL, recalling
from twins import contents

from minikv.chat.session import ChatSession
from minikv.cli.screen import render


def asked(**given: Any) -> ChatSession:
    return talked(recalling(**given), MILL, "Who?", "Why?", "And the river?")


def test_every_record_of_a_chat_with_a_tier_has_it() -> None:
    session = asked()
    for report in session.reports:
        lost = report.fidelity
        assert lost.kl_first_token > 0
        assert 0 < lost.output_error_mean <= lost.output_error_max
        assert lost.output_error_layer in (0, 1)
        assert report.time_s.fidelity > 0
        assert f"the first would be {lost.kl_first_token:.2g} nats off" in render.stats(report)
        assert "fidelity" in dict(render.figures(report))
        record = json.loads(json.dumps(report.to_dict()))
        assert record["fidelity"]["kl_first_token"] == lost.kl_first_token
    plain = talked(chat(reuse="refresh"), MILL, "Who?")
    assert plain.reports[0].fidelity is None
    assert "fidelity" not in render.stats(plain.reports[0])


def test_measuring_changes_no_answer_and_no_row() -> None:
    one, two = asked(), asked(fidelity=False)
    assert [turn.answer for turn in one.turns] == [turn.answer for turn in two.turns]
    assert one.fed == two.fed
    assert held_of(one) == held_of(two)
    assert contents(one.engine.kv.arena) == contents(two.engine.kv.arena)
    kinds = [{n: c.dtype for n, c in each.engine.kv.arena.columns.items()} for each in (one, two)]
    assert kinds[0] == kinds[1]
    assert {report.fidelity for report in two.reports} == {None}
    assert {report.time_s.fidelity for report in two.reports} != {None}


def test_no_memory_to_measure_fails_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    session = talked(recalling(), MILL)
    monkeypatch.setattr(session.engine.kv, "last_token", lambda: [][0])
    with pytest.raises(IndexError):  # only what memory and the device raise is passed over
        say(session, "Who?")

    full = torch.OutOfMemoryError("no room")
    monkeypatch.setattr(session.engine.kv, "last_token", failing(full))
    answer, _ = say(session, "Who?")
    assert answer == asked().turns[0].answer
    lost = session.reports[0].fidelity
    assert lost.kl_first_token is None
    assert "not measured" in render.stats(session.reports[0])
