"""Steps and prompts of several systems, in turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minikv.cli.bench import decode, models, peer, prefill, shapes, turns
from minikv.cli.bench.arguments import Arguments
from minikv.cli.bench.cached import Cached
from minikv.cli.bench.floors import Rates
from minikv.cli.bench.results import Results
from minikv.errors import UsageError
from minikv.models.linear import lacks

CPU, TINY = torch.device("cpu"), shapes.find("tiny")
RATES = Rates(5e9, 1e10, 8e9, 2e11, 1e11, on_gpu=False)


def measured(question: Any, results: Results | None = None, **flags: Any) -> Results:
    made = results or Results()
    given = {"length": "64", "budget": "64", "repeat": 1, "steps": 2, "peer": False} | flags
    question.measure(Arguments(shape="tiny", **given), CPU, RATES, made)
    return made


def test_systems_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    write = Cached.write

    def noted(self: Cached, steps: int) -> float:
        order.append(f"{self.eviction.policy} {self.eviction.decode} {steps}")
        return write(self, steps)

    monkeypatch.setattr(Cached, "write", noted)
    measured(decode, policy="snapkv,h2o", repeat=2, steps=4)
    # A policy that chooses in steps is followed by the same cache without one; three steps that
    # are not measured come before those that are.
    turn = ["full none", "snapkv h2o", "full none", "h2o h2o", "full none"]
    warmed = [f"{name} 3" for name in (turn[0], turn[1], turn[3])]
    assert order == warmed + [f"{name} {steps}" for name in turn for steps in (3, 4)] * 2


def test_rows_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for seen in ([3e9, 2e9], [2e10, 4e10]):  # slower than a buffer was read, and faster
        rates = iter(seen)
        monkeypatch.setattr(models, "reading_rate", lambda net, rates=rates: next(rates))
        rows = measured(decode, length="128", policy="snapkv", repeat=2).rows
        full, evicting = rows
        assert [row.policy for row in rows] == ["full", "snapkv"]
        assert (full.vs_full, full.evict_share, full.budget) == (1.0, None, "-")
        assert evicting.vs_full == pytest.approx(full.seconds / evicting.seconds)
        assert isinstance(evicting.evict_share, float)
        assert evicting.kv_bytes["kept_mean"] == 64
        # The prompt and three steps of the warm-up; 2 layers of 2 heads, keys and values of 16.
        assert full.step_bytes["kv"] == (128 + 3) * 2 * 2 * 2 * 16 * 2
        for row in rows:
            assert len(row.times) == 2
            assert row.kv_bytes["full"] == 128 * 2 * 2 * (2 * 16 * 2 + 4)
            assert row.step_bytes["weights"] == 2 * (TINY.parameters - TINY.head)
            assert row.read_bytes_s == max(1e10, *seen)
            assert row.floor_s == sum(row.step_bytes.values()) / row.read_bytes_s
            assert row.peak_bytes is not None
            assert row.peak_bytes > 1 << 20


def test_rows_of_prompts() -> None:
    full, evicting = measured(prefill, policy="streaming", length="600").rows
    linear, attention = TINY.linear_flops(600), TINY.attention_flops(600)
    assert full.floor_s == evicting.floor_s == (linear + attention) / 2e11
    assert full.evict_share is None
    assert evicting.evict_share == pytest.approx(evicting.seconds / full.seconds - 1)
    assert full.tok_s == pytest.approx(600 / full.seconds)
    assert (full.step_bytes, full.captured, full.read_bytes_s) == ({}, None, None)


def test_int8_weights_and_cache_stand_beside_plain_ones() -> None:
    if lacks("int8"):
        pytest.skip("no int8 kernel here")
    results = measured(decode, policy="full", weights="auto,int8", kv="int8")
    plain, small = results.rows
    assert [row.weights for row in results.rows] == ["auto", "int8"]
    assert {row.kv for row in results.rows} == {"int8"}
    # A byte a weight in the layers' matrices, with a scale a row; the head stays as it is.
    assert small.step_bytes["weights"] < plain.step_bytes["weights"] - TINY.matrices // 2
    assert small.vs_full == pytest.approx(plain.seconds / small.seconds)
    assert small.step_bytes["kv"] == (64 + 3) * 4 * 2 * (16 + 4)  # 16 codes and a scale, twice
    assert results.facts["wanted"]["weights"] == ["auto", "int8"]  # type: ignore[index]


def test_a_captured_step_beside_one_that_is_not_says_nothing_about_eviction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not torch.cuda.is_available():
        assert [row.captured for row in measured(decode).rows] == [False, False]
    captured = property(lambda self: self.eviction.decode == "none")
    monkeypatch.setattr(Cached, "captured", captured)
    uneven = measured(decode)
    assert [row.captured for row in uneven.rows] == [True, False]
    assert uneven.rows[1].evict_share is None
    assert "steps with eviction were not captured" in uneven.notes[0]


def test_one_system_that_fails_costs_only_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Cached) -> Cached:
        if self.eviction.policy == "snapkv":
            raise AssertionError
        return base(self)

    base = Cached.without_policy
    monkeypatch.setattr(Cached, "without_policy", fails)
    made = measured(decode, policy="snapkv,h2o")
    assert [row.policy for row in made.rows] == ["full", "h2o"]
    assert made.notes == ["decode 64: reading, snapkv 64: AssertionError"]
    assert isinstance(made.failures[0], AssertionError)


def test_a_budget_too_small_is_refused_before_anything_is_measured() -> None:
    made = Results()
    with pytest.raises(UsageError, match="too small"):
        measured(decode, made, budget="2")
    assert not made.measured


@pytest.mark.parametrize("question", [decode, prefill])
def test_an_interrupted_run_keeps_the_rounds_that_it_has(
    question: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn, calls = turns.Run.each, list[str]()

    def stops(self: turns.Run, what: str, entries: Any, work: Any) -> None:
        calls.append(what)
        turn(self, what, entries[:1] if "round 2" in what else entries, work)
        if "round 2" in what:
            raise KeyboardInterrupt

    monkeypatch.setattr(turns.Run, "each", stops)
    made = Results()
    with pytest.raises(KeyboardInterrupt):
        measured(question, made, policy="snapkv", repeat=3)
    assert [(row.policy, len(row.times)) for row in made.rows] == [("full", 2), ("snapkv", 1)]


@pytest.mark.parametrize("ends", [True, False])
def test_a_peer_that_fails_costs_only_its_own_rows(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails:
        name, alive = "transformers", True

        def __init__(self, *arguments: object) -> None: ...

        def read(self, ids: list[int]) -> float:
            if len(ids) == 128:
                self.alive = not ends
                raise peer.PeerError("transformers: no such head")
            return 1.0

        def write(self, steps: int) -> float:
            return 1.0

        def peak(self) -> int:
            return 1

        def close(self) -> None: ...

    monkeypatch.setattr(peer, "Process", Fails)
    monkeypatch.setattr(peer, "installed", lambda: True)
    made = measured(decode, policy="full", length="128,64", peer=True)
    theirs = [] if ends else ["transformers"]
    assert [row.system for row in made.rows] == ["minikv", "minikv", *theirs]
    assert made.notes == ["decode 128: reading, transformers: no such head"]
    assert made.failures == []
