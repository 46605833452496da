"""Steps and prompts of several systems, in turns, beside floors computed by hand."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from minikv.cli.asked import Bench
from minikv.cli.bench import networks, speed, systems
from minikv.cli.bench.systems import Cached
from minikv.cli.measure import STDOUT
from minikv.cli.screen.terminal import Terminal
from minikv.models.linear import lacks
from minikv.settings import Settings

TINY = networks.find("TINY")


def measured(
    policy: str = "snapkv", kv: str = "auto", weights: str = "auto", **flags: Any
) -> dict[str, Any]:
    """The record of a run."""
    terminal = Terminal(quiet=True)
    terminal.out = io.StringIO()
    given = {"question": "decode", "length": "64", "repeat": 1, "steps": 2, "peer": False} | flags
    asked = Bench(shape="tiny", as_json=STDOUT, **given)
    settings = Settings(policy=policy, budget="64", kv=kv, weights=weights, device="cpu")
    speed.measure(asked, settings, terminal, [])
    made: dict[str, Any] = json.loads(terminal.out.getvalue())
    return made


def test_systems_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    write = Cached.write

    def noted(self: Cached, steps: int) -> float:
        order.append(f"{self.name} {steps}")
        return write(self, steps)

    monkeypatch.setattr(Cached, "write", noted)
    measured(repeat=2, steps=4)
    # Three steps come before those that count.
    turn = ["full 3", "full 4", "snapkv+h2o 64 3", "snapkv+h2o 64 4"]
    assert order == ["full 3", "snapkv+h2o 64 3", *turn, *turn]


@pytest.mark.parametrize("seen", [[3e9, 2e9], [2e10, 4e10]])
def test_rows_of_steps(seen: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is slower than before the run, and faster: the floor is that of the fastest."""
    rates = iter(seen * 2)
    monkeypatch.setattr(networks, "bandwidth", lambda device: 1e10)
    monkeypatch.setattr(networks, "read_rate", lambda size, rounds: next(rates))
    full, evicting = measured(length="128", repeat=2)["rows"]
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
    full, evicting = measured(question="prefill", policy="streaming", length="600")["rows"]
    assert full["tok_s"] == pytest.approx(600 / full["seconds"])
    assert evicting["kv_bytes"]["kept_mean"] == 64
    assert full["floor_s"] is full["captured"] is None


def test_int8_weights_and_cache_are_bytes_less() -> None:
    if lacks("int8"):
        pytest.skip("no int8 kernel here")
    found = [measured("full", "int8", weights)["rows"][0] for weights in ("auto", "int8")]
    plain, small = found
    assert [row["name"] for row in found] == ["full kv int8", "full int8 kv int8"]
    # A byte a weight in the layers' matrices, with a scale a row; the head stays as it is.
    numbers = 2 * TINY.hidden * (2 * 64 + 2 * 32 + 3 * TINY.mlp)
    assert small["step_bytes"]["weights"] < plain["step_bytes"]["weights"] - numbers // 2
    assert small["step_bytes"]["kv"] == (64 + 3) * 4 * 2 * (16 + 4)  # 16 codes and a scale, twice


def test_a_peer_that_fails_costs_only_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(systems.Transformers):
        def __init__(self, *arguments: object) -> None: ...

        def read(self, ids: list[int], room: int = 0) -> float:
            if len(ids) == 128:
                raise RuntimeError("no such head")
            return 1.0

        def write(self, steps: int) -> float:
            return 1.0

    monkeypatch.setattr(speed, "Transformers", Fails)
    monkeypatch.setattr(systems, "installed", lambda: True)
    made = measured(policy="full", length="128,64", peer=True)
    names = [(row["length"], row["system"]) for row in made["rows"]]
    assert names == [(128, "minikv"), (64, "minikv"), (64, "transformers")]
    assert made["notes"] == ["decode 128: beginning, transformers: no such head"]
    assert made["rows"][1]["vs_transformers"] == 1 / made["rows"][1]["seconds"]
