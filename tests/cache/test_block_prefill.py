"""Prompts read in blocks: against steps, against the authors' traces, and what must always hold."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from pairwise import some_by_day
from refusals import refused
from safetensors.torch import load_file
from small import SOON, VOCAB, Walk, engine, ids, network
from torch import Tensor
from views import kept, rule

from minikv import policies
from minikv.cache import block_prefill
from minikv.cache.budget import Budget
from minikv.cache.kv_cache import KVCache
from minikv.cache.rules import Rules
from minikv.cache.stats import Shape
from minikv.chat.eviction_config import EvictionConfig
from minikv.engine.engine import Engine
from minikv.errors import Interrupted
from minikv.models.llama import Llama
from minikv.policies.base import StepPolicy
from minikv.policies.tova import Tova

DATA = Path(__file__).parents[1] / "data"
CASES = {case["id"]: case for case in json.loads((DATA / "parity.json").read_text())}
STEPS = [name for name in policies.step_names() if name != "none"]


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return load_file(DATA / "parity.safetensors")


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("windows", [None, (None, 24, None)])
def test_blocks_of_one_are_steps(name: str, windows: tuple[int | None, ...] | None) -> None:
    """R4: the same rows and the same logits as a prompt of one token and then step after step."""
    net = network(windows=windows)
    # No token twice: its keys would have the same norm, and rounding would choose the victim.
    tokens = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))[:70].tolist()
    one: dict[str, object] | None = dict.fromkeys(SOON[name], 1) if name in SOON else None
    blocks = strided(net, name, 30, 1, one)
    steps = engine(net, "full", name, 30, step_options=one)
    logits = blocks.prompt(tokens)
    want = steps.prompt(tokens[:1])
    for token in tokens[1:]:
        want = steps.step(token)
    assert torch.allclose(logits, want, rtol=1e-4, atol=1e-4)
    if windows is None or not steps.kv.rules.step.evict_first:  # type: ignore[union-attr]
        gone = [  # a step marks its victim at once, a block removes it at the next
            set(a) ^ set(b) for a, b in zip(kept(blocks.kv), kept(steps.kv), strict=True)
        ]
        assert all(len(rows) <= (1 if windows else 0) for rows in gone)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every block that is mixed: no other prompt of these tests goes by positions."""
    sizes: list[int] = []
    mix = block_prefill.visible_attention

    def listen(query: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        sizes.append(query.shape[2])
        return mix(query, *rest)

    monkeypatch.setattr(block_prefill, "visible_attention", listen)
    return sizes


def strided(
    net: Llama, name: str, budget: int, stride: int, options: dict[str, object] | None = None
) -> Engine:
    return engine(net, "full", name, budget, stride=stride, step_options=options)


def split(length: int, stride: int) -> list[int]:
    return [stride] * (length // stride) + ([length % stride] if length % stride else [])


def test_chunks_of_the_network_do_not_change_the_blocks(blocks: list[int]) -> None:
    """Chunks of 64 and of 256 rows give the same blocks of 32, so the same rows."""
    found = []
    for rows in (64, 256):
        run = strided(network(layers=1, rows=rows), "roco", 60, 32)
        run.prompt(ids(300))
        assert blocks == split(300, 32)
        blocks.clear()
        found.append(kept(run.kv))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", STEPS)
def test_a_budget_above_the_length_changes_nothing(name: str) -> None:
    """Beside a whole prompt: to rounding, for attention is summed in another order."""
    net = network()
    run, full = strided(net, name, 400, 16), engine(net)
    for turn in range(2):
        got, want = run.prompt(ids(90, seed=turn)), full.prompt(ids(90, seed=turn))
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-4)
        assert kept(run.kv) == kept(full.kv)


@pytest.mark.parametrize("name", ["roco", "hashevict"])
def test_a_stopped_prompt_leaves_no_trace(name: str) -> None:
    net = network(rows=16)
    plain, stopped = strided(net, name, 40, 8), strided(net, name, 40, 8)
    for run in (plain, stopped):
        run.prompt(ids(100))
        run.step(3)
    want = plain.prompt(ids(60, seed=1))
    for at in range(1, 12, 3):
        stop = Mock(side_effect=[None] * (at - 1) + [Interrupted("stopped", "")])
        with pytest.raises(Interrupted):
            stopped.prompt(ids(60, seed=2), progress=stop)
    assert torch.equal(stopped.prompt(ids(60, seed=1)), want)
    assert kept(stopped.kv) == kept(plain.kv)


def feed(kv: KVCache, query: Tensor, key: Tensor) -> None:
    kv.begin(len(key))
    kv.attend(0, query, key, key)
    kv.end(len(key))


@dataclass(frozen=True, slots=True, kw_only=True)
class TovaOfRelease(Tova):
    """TOVA as the release has it: more than the newest row stay."""

    newest: int

    @property
    def recent(self) -> int:  # type: ignore[override]
        return self.newest


def easykv(name: str, params: dict[str, int], *, decode: bool = False) -> StepPolicy:
    """The release's rule in our terms: its scope leaves 4 sinks aside, its recents are a share."""
    cap, recent = params["kept"], params["recent"]
    if name == "roco":
        saved = int(0.3 * cap) if decode else int(0.1 * cap) + 4
        sinks = 0 if decode else 4
        share = (saved + 0.5) / cap
        given = {"sinks": sinks, "recent": 10, "scope": share, "scope_prompt": share}
        return rule("roco", given)
    if name == "h2o":
        return rule("h2o", {"sinks": 4, "recent_share": (recent + 0.5) / cap})
    if name == "tova":
        return TovaOfRelease(per_head=False, sinks=4, protect_newest=True, newest=recent)
    return rule("streaming", {"sinks": 4})


def easykv_case(
    id: str, name: str, tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor], KVCache]:
    """What was recorded of the release, its parameters, and a cache that is full. The release's
    statistics begin when it is: those of the first rows are cleared here."""
    case = CASES[id]
    params = case["params"]
    data = {role: tensors[t] for role, t in case["tensors"].items()}
    heads, group, size, cap = params["Hk"], params["G"], params["d"], params["kept"]
    kv = KVCache(
        Shape(1, heads, heads * group, size, (None,), 1 << 20),
        Rules(None, easykv(name, params), Budget.parse(cap), params["stride"]),
    )
    data["q"], data["k"] = data["q"].transpose(0, 1), data["k"].transpose(0, 1)
    feed(kv, data["q"][:cap], data["k"][:cap])
    for column in kv.arena.extra:
        kv.arena.columns[column].zero_()
    return params, data, kv


@pytest.mark.parametrize("name", ["roco", "h2o", "tova", "streaming"])
def test_easykv_blocks(name: str, tensors: dict[str, Tensor]) -> None:
    params, data, kv = easykv_case(f"easykv_prefill_{name}", name, tensors)
    heads, cap, query, key = params["Hk"], params["kept"], data["q"], data["k"]
    held = [set(range(cap)) for _ in range(heads)]
    for event, victims in enumerate(data["victims"].tolist()):
        lo = cap + event * params["stride"]
        hi = lo + params["stride"]
        feed(kv, query[lo:hi], key[lo:hi])
        for h in range(heads):
            held[h] = (held[h] | set(range(lo, hi))) - set(victims[h])
            assert set(kv.kept(0, h).tolist()) == held[h], f"event {event}, head {h}"
    final = data["expected_final_kept"].split(data["expected_final_kept_len"].tolist())
    assert kept(kv) == [rows.tolist() for rows in final]


def test_easykv_blocks_then_steps(tensors: dict[str, Tensor]) -> None:
    params, data, kv = easykv_case("easykv_prefill_then_decode_roco", "roco", tensors)
    heads, cap, query, key = params["Hk"], params["kept"], data["q"], data["k"]
    feed(kv, query[cap : params["N"]], key[cap : params["N"]])
    held = [set(range(params["N"])) for _ in range(heads)]
    for event in data["victims_prefill"].tolist():
        for h in range(heads):
            held[h] -= set(event[h])
    assert kept(kv) == [sorted(rows) for rows in held]
    kv.configure(
        Rules(None, easykv("roco", params, decode=True), Budget.parse(cap), params["stride"])
    )
    for i, victims in enumerate(data["victims_decode"].tolist()):
        at = params["N"] + i
        kv.attend(0, query[at : at + 1], key[at : at + 1], key[at : at + 1])
        kv.end(1)
        for h in range(heads):
            held[h] = (held[h] | {at}) - {victims[h]}
            assert set(kv.kept(0, h).tolist()) == held[h], f"step {i}, head {h}"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"policy": "adakv", "stride": 8}, "adakv cannot read a prompt in blocks"),
        ({"policy": "none", "stride": 8}, "none cannot read a prompt in blocks"),
        ({"policy": "roco", "stride": 3}, "must be a power of two"),
        ({"policy": "roco", "stride": 512}, "must be a power of two"),
        ({"policy": "roco", "decode": "h2o", "stride": 8}, "roco also evicts while writing"),
    ],
)
def test_what_does_not_go_together(given: dict[str, object], says: str) -> None:
    refused(says, EvictionConfig.read, **given)


def test_the_smallest_budget_counts_the_block(blocks: list[int]) -> None:
    """A policy that evicts before attention needs room for the block inside its cap."""
    net = network(rows=256)
    found = refused("too small", strided, net, "hashevict", 30, 32)
    assert "is 46 tokens per head" in found.hint
    run = strided(net, "hashevict", 46, 32)
    run.prompt(ids(200))
    assert {len(rows) for rows in kept(run.kv)} == {46}
    assert blocks == split(200, 32) * 3


@pytest.mark.parametrize("name", ["roco", "hashevict"])
def test_progress_in_blocks_goes_once_from_nothing_to_all(name: str) -> None:
    seen: list[tuple[int, int]] = []
    run = strided(network(rows=16), name, 40, 8)
    run.prompt(ids(100), progress=lambda done, total: seen.append((done, total)))
    done = [n for n, _ in seen]
    assert done == sorted(done)
    assert done[:2] == [5, 10]  # 16 tokens of the first of three layers, then 32
    assert seen[-1] == (100, 100)


@pytest.mark.parametrize(
    ("name", "stride"),
    some_by_day(product(STEPS, (8, 64)), lambda case: case[1] == (8, 64)[STEPS.index(case[0]) % 2]),
)
def test_no_head_holds_more_than_without_eviction(name: str, stride: int) -> None:
    """After prompts shorter and longer than the stride, the budget and a layer's window, and after
    steps: also in the layer with a window, of which the full cache keeps what the next token
    sees."""
    net = network(windows=(None, 24, None))
    for budget, lengths in ((80, (5, 9)), (150, (31, 3)), (80, (40, 40)), (150, (130, 1))):
        some, full = strided(net, name, budget, stride), engine(net, "full", "none", budget)
        for number, length in enumerate(lengths):
            tokens = ids(length, number)
            for run in (some, full):
                run.prompt(tokens)
            for _ in range(3):
                found, most = some.kv.stats(), full.kv.stats()
                assert bool((some.kv.arena.held <= full.kv.arena.held).all()), lengths
                assert found.held_bytes - found.state_bytes <= most.held_bytes == found.full_bytes
                for run in (some, full):
                    run.step(3)


@pytest.mark.parametrize("name", ["hashevict", "l2", "random", "scissorhands", "roco"])
def test_heads_of_another_policy_give_up_different_numbers_of_rows(name: str) -> None:
    """Those that have few to give keep their first and last rows, whatever the others give up."""
    for seed in range(4):
        walk = Walk(EvictionConfig.read("snapkv+ada", "none", 58, {"window": 24, "alpha": 0.0}))
        walk.prompt(ids(111, seed))
        options = {"sinks": 21, "recent": 13}
        walk.configure(EvictionConfig.read(name, "auto", 49, options, stride=4))
        walk.prompt(ids(89, seed + 1))
