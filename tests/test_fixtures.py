"""Kept sets against numbers computed with the authors' released code.

data/parity.json names, per case, repository, commit and file; the tensors hold numbers only.
Everything runs through the scheduler, on a network of one layer that is its keys and queries.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from minikv import policies
from minikv.budget import Budget
from minikv.policies.adakv import adaptive_heads
from minikv.policies.snapkv import window_scorer
from minikv.policy import PromptView
from minikv.scheduler import Scheduler
from minikv.stats import Shape

DATA = Path(__file__).parent / "data"
CASES = {case["id"]: case for case in json.loads((DATA / "parity.json").read_text())}


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return load_file(DATA / "parity.safetensors")


def of(policy: str) -> list[str]:
    return [name for name, case in CASES.items() if case["policy"] == policy]


def roles(case: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {role: tensors[name] for role, name in case["tensors"].items()}


def ragged(flat: Tensor, lengths: Tensor) -> list[list[int]]:
    return [part.tolist() for part in flat.split(lengths.tolist())]


def one_layer(
    heads: int, group: int, size: int, prompt: object, step: object, budget: int
) -> Scheduler:
    shape = Shape(1, heads, heads * group, size, (None,), 1 << 20)
    return Scheduler(shape, prompt, step, Budget.parse(budget), poison=True)  # type: ignore[arg-type]


def options(params: dict[str, Any]) -> dict[str, object]:
    return {
        "window": params["W"], "kernel": params["kernel"], "pooling": params["pooling"],
        "group": params["group_reduce"],
    }  # fmt: skip


def run_prompt(kv: Scheduler, params: dict[str, Any], data: dict[str, Tensor]) -> list[list[int]]:
    key = data["k"].transpose(0, 1)  # [N, Hk, d]
    query = torch.zeros(params["N"], params["Hk"] * params["G"], params["d"])
    query[-params["W"] :] = data["q_window"].transpose(0, 1)
    kv.begin(params["N"])
    for lo in range(0, params["N"], 64):
        kv.attend(0, query[lo : lo + 64], key[lo : lo + 64], key[lo : lo + 64])
    kv.advance(params["N"])
    return [kv.kept(0, head).tolist() for head in range(params["Hk"])]


@pytest.mark.parametrize("name", of("snapkv"))
def test_snapkv(name: str, tensors: dict[str, Tensor]) -> None:
    case, data = CASES[name], roles(CASES[name], tensors)
    params = case["params"]
    policy = policies.prompt_policy("snapkv", options(params))
    kv = one_layer(params["Hk"], params["G"], params["d"], policy, None, params["B"])
    kept = run_prompt(kv, params, data)
    assert kept == ragged(data["expected_kept"], data["expected_kept_len"])


@pytest.mark.parametrize("name", of("adakv"))
def test_adakv(name: str, tensors: dict[str, Tensor]) -> None:
    case, data = CASES[name], roles(CASES[name], tensors)
    params = case["params"]
    given = options(params) | {
        "alpha": params["alpha"], "rounding": "official", "normalize": params["normalize"],
    }  # fmt: skip
    policy = policies.prompt_policy("adakv", given)
    kv = one_layer(params["Hk"], params["G"], params["d"], policy, None, params["B"])
    kept = run_prompt(kv, params, data)
    assert kept == ragged(data["expected_kept"], data["expected_kept_len"])
    assert [len(rows) for rows in kept] == data["expected_budget"].tolist()


@pytest.mark.parametrize("name", of("snapkv") + of("adakv"))
def test_scores(name: str, tensors: dict[str, Tensor]) -> None:
    """The pooled scores themselves, to 2e-4, where the case has them."""
    from minikv import kernels

    case, data = CASES[name], roles(CASES[name], tensors)
    params = case["params"]
    n, w = params["N"], params["W"]
    pos = torch.arange(n)
    query = data["q_window"].transpose(0, 1).unflatten(1, (params["Hk"], params["G"]))
    mass, squares = kernels.observe(query, pos[-w:], [(data["k"], pos[None])], None)
    torch.testing.assert_close(mass.sum(-1), torch.full(mass.shape[:2], float(w)))
    view = PromptView(
        0, n, pos.expand(params["Hk"], n), w, mass, squares, lambda: mass, lambda: mass
    )
    scores = window_scorer(w, params["kernel"], params["pooling"], params["group_reduce"])(view)
    want = data["expected_score"]
    if params["window_reduce"] == "sum":
        want = want / w
    torch.testing.assert_close(scores[:, : n - w], want, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.05, 0.2, 0.35, 1.0])
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_exact_rounding_sums_to_the_row(alpha: float, heads: int) -> None:
    generator = torch.Generator().manual_seed(7)
    for _ in range(20):
        scores = torch.rand(heads, 90, generator=generator)
        free = torch.rand(heads, 90, generator=generator) > 0.2
        total = heads * int(torch.randint(1, 60, (1,), generator=generator))
        pos = torch.arange(90).expand(heads, 90)
        counts = adaptive_heads(alpha)(scores, pos, free, total)
        assert sum(counts) == min(total, int(free.sum()))
        floor = int(alpha * total / heads)
        for count, most in zip(counts, free.sum(1).tolist(), strict=True):
            assert min(floor, most) <= count <= most


@pytest.mark.parametrize("name", of("streaming"))
def test_streaming(name: str, tensors: dict[str, Tensor]) -> None:
    case, data = CASES[name], roles(CASES[name], tensors)
    params = case["params"]
    given = {"sinks": params["start"]}
    kv = one_layer(
        2, 2, 4, policies.prompt_policy("streaming", given),
        policies.step_policy("streaming", given), params["start"] + params["recent"],
    )  # fmt: skip
    want = ragged(data["expected_kept"], data["expected_kept_len"])
    for (kind, count), kept in zip(data["events"].tolist(), want, strict=True):
        if kind != 1:
            kv.begin(count)
        for rows in [count] if kind != 1 else [1] * count:
            kv.attend(0, torch.randn(rows, 4, 4), torch.randn(rows, 2, 4), torch.randn(rows, 2, 4))
            kv.advance(rows)
        if kind == 2 and count > params["recent"]:
            continue  # the release does not trim after a later block; ours always ends at B
        assert kv.kept(0, 0).tolist() == kept
        assert kv.kept(0, 1).tolist() == kept


@pytest.mark.parametrize("name", of("roco"))
def test_roco(name: str, tensors: dict[str, Tensor]) -> None:
    """The release exempts the prompt and counts b over the answer: here the prompt's P rows are
    sinks, the cap is P + b, and `scope` is chosen so that as many rows are saved, int(0.3 b)."""
    case, data = CASES[name], roles(CASES[name], tensors)
    params = case["params"]
    first, b = params["P"], params["b"]
    saved = int(0.3 * b) + first
    policy = policies.step_policy(
        "roco", {"sinks": first, "recent": 10, "scope": (saved + 0.5) / (first + b)}
    )
    kv = one_layer(params["Hk"], params["G"], params["d"], None, policy, first + b)
    query, key = data["q"].transpose(0, 1), data["k"].transpose(0, 1)
    kv.begin(first)
    kv.attend(0, query[:first], key[:first], key[:first])
    kv.advance(first)
    held = [set(range(first)) for _ in range(params["Hk"])]
    evicted = 0
    for i, victims in enumerate(data["victims"].tolist()):
        at = first + i
        kv.attend(0, query[at : at + 1], key[at : at + 1], key[at : at + 1])
        kv.advance(1)
        for head, victim in enumerate(victims):
            held[head] = (held[head] | {at}) - {victim}
            assert set(kv.kept(0, head).tolist()) == held[head], f"step {i}, head {head}"
            evicted += victim >= 0
    assert evicted == 2 * (params["steps"] - b)
    final = ragged(data["expected_final_kept"], data["expected_final_kept_len"])
    assert [kv.kept(0, head).tolist() for head in range(params["Hk"])] == final
