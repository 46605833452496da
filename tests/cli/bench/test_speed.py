"""Steps and prompts of several systems, in turns, beside floors computed by hand."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from minikv.cli.bench import machine, networks, speed, systems
from minikv.cli.bench.arguments import Arguments
from minikv.cli.bench.machine import Rates
from minikv.cli.bench.systems import Cached
from minikv.cli.measure import Results
from minikv.cli.screen.terminal import Terminal
from minikv.errors import UsageError
from minikv.models.linear import lacks

CPU, TINY = torch.device("cpu"), networks.find("tiny")
RATES = Rates(1e10, 8e9, 2e11, 1e11, on_gpu=False)


def measured(*, decode: bool = True, **flags: Any) -> Results:
    terminal = Terminal(quiet=True)
    terminal.out = io.StringIO()
    made = Results(terminal, None, {"rows": []})
    given = {"length": "64", "budget": "64", "repeat": 1, "steps": 2, "peer": False} | flags
    speed.measure(Arguments(shape="tiny", **given), CPU, RATES, made, decode=decode)
    return made


def rows(**flags: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = measured(**flags).record["rows"]
    return found


def test_sizes_flops_and_floors() -> None:
    # 4,096 x (2 x 4,096 + 2 x 1,024) of attention and 3 x 4,096 x 14,336 of MLP, 32 times.
    assert networks.matrices(networks.find("LLAMA-3-8B")) == 32 * (
        4096 * 10_240 + 3 * 4096 * 14_336
    )
    assert round(networks.SHAPES["llama-3-8b"].parameters / 1e9, 2) == 8.03
    one = networks.llama(1, 8, 2, 1, 4, 16, 32)
    assert networks.matrices(one) == 8 * (2 * 8 + 2 * 4 + 3 * 16)
    # Three tokens: every matrix thrice, the head once.
    assert networks.linear_flops(one, 3) == 2 * (3 * 576 + 32 * 8) == 3968
    # Query 0 sees one token, 1 two, 2 three: six pairs, two products of size 4 each, two heads.
    assert networks.attention_flops(one, 3) == 6 * 2 * 2 * (4 + 4) == 192
    assert (RATES.stream, RATES.product("bfloat16"), RATES.product("float32")) == (1e10, 2e11, 1e11)
    assert Rates(3e12, 4e12, 8e14, 5e13, on_gpu=True).stream == 4e12


def test_systems_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    write = Cached.write

    def noted(self: Cached, steps: int) -> float:
        order.append(f"{self.eviction.policy} {self.eviction.decode} {steps}")
        return write(self, steps)

    monkeypatch.setattr(Cached, "write", noted)
    measured(policy="snapkv", repeat=2, steps=4)
    # Three steps come before those that count.
    turn = ["full none 3", "full none 4", "snapkv h2o 3", "snapkv h2o 4"]
    assert order == ["full none 3", "snapkv h2o 3", *turn, *turn]


@pytest.mark.parametrize("seen", [[3e9, 2e9], [2e10, 4e10]])
def test_rows_of_steps(seen: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is slower than before the run, and faster: the floor is that of the fastest."""
    rates = iter(seen * 2)
    monkeypatch.setattr(machine, "read_rate", lambda size, rounds: next(rates))
    full, evicting = rows(length="128", policy="snapkv", repeat=2)
    assert [full["policy"], evicting["policy"]] == ["full", "snapkv"]
    assert (full["vs_full"], full["budget"]) == (1.0, "-")
    assert full["vs_transformers"] is None
    assert evicting["vs_full"] == pytest.approx(full["seconds"] / evicting["seconds"])
    assert evicting["kv_bytes"]["kept_mean"] == 64
    # The prompt and three steps of the warm-up; 2 layers of 2 heads, keys and values of 16.
    assert full["step_bytes"]["kv"] == (128 + 3) * 2 * 2 * 2 * 16 * 2
    for row in (full, evicting):
        assert len(row["times"]) == 2
        assert row["kv_bytes"]["full"] == 128 * 2 * 2 * (2 * 16 * 2 + 4)
        assert row["step_bytes"]["weights"] == 2 * (TINY.parameters - TINY.vocab * TINY.hidden)
        assert row["read_bytes_s"] == max(1e10, *seen)
        assert row["floor_s"] == sum(row["step_bytes"].values()) / row["read_bytes_s"]
        assert row["tok_s"] == 1 / row["seconds"]


def test_rows_of_prompts() -> None:
    full, evicting = rows(decode=False, policy="streaming", length="600")
    linear, attention = networks.linear_flops(TINY, 600), networks.attention_flops(TINY, 600)
    assert full["floor_s"] == evicting["floor_s"] == (linear + attention) / 2e11
    assert full["tok_s"] == pytest.approx(600 / full["seconds"])
    nothing = ({}, None, None)
    keys = ("step_bytes", "captured", "read_bytes_s")
    assert tuple(full[key] for key in keys) == nothing


def test_int8_weights_and_cache_are_measured_beside_plain_ones() -> None:
    if lacks("int8"):
        pytest.skip("no int8 kernel here")
    plain, small = rows(policy="full", weights="auto,int8", kv="int8")
    assert [(row["weights"], row["kv"]) for row in (plain, small)] == [
        ("auto", "int8"),
        ("int8", "int8"),
    ]
    # A byte a weight in the layers' matrices, with a scale a row; the head stays as it is.
    assert (
        small["step_bytes"]["weights"]
        < plain["step_bytes"]["weights"] - networks.matrices(TINY) // 2
    )
    assert small["vs_full"] == pytest.approx(plain["seconds"] / small["seconds"])
    assert small["step_bytes"]["kv"] == (64 + 3) * 4 * 2 * (16 + 4)  # 16 codes and a scale, twice


def test_one_system_that_fails_costs_only_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    write = Cached.write

    def fails(self: Cached, steps: int) -> float:
        if self.eviction.policy == "snapkv" and steps == 2:
            raise AssertionError
        return write(self, steps)

    monkeypatch.setattr(Cached, "write", fails)
    made = measured(policy="snapkv,h2o")
    assert [row["policy"] for row in made.record["rows"]] == ["full", "h2o"]
    assert made.record["notes"] == ["decode 64: round 1 of 1, snapkv+h2o 64: AssertionError"]
    assert isinstance(made.failures[0], AssertionError)


def test_a_budget_too_small_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(UsageError, match="too small"):
        measured(budget="2")


def test_a_peer_that_fails_costs_only_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails:
        facts = systems.Transformers.facts

        def __init__(self, *arguments: object) -> None: ...

        def read(self, ids: list[int], room: int = 0) -> float:
            if len(ids) == 128:
                raise RuntimeError("no such head")
            return 1.0

        def write(self, steps: int) -> float:
            return 1.0

        def close(self) -> None: ...

    monkeypatch.setattr(speed, "Transformers", Fails)
    monkeypatch.setattr(systems, "installed", lambda: True)
    made = measured(policy="full", length="128,64", peer=True)
    names = [(row["length"], row["system"]) for row in made.record["rows"]]
    assert names == [(128, "minikv"), (64, "minikv"), (64, "transformers")]
    assert made.record["notes"] == ["decode 128: beginning, transformers: no such head"]
    assert made.failures == []
    assert made.record["rows"][1]["vs_transformers"] == 1 / made.record["rows"][1]["seconds"]
