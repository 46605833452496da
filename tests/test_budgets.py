"""Budgets to the row, for every policy: what is handed out, and what a cache then holds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import PAIRS, engine, ids, network
from torch import Tensor

from minikv import policies
from minikv.policies.adakv import adaptive_heads
from minikv.policy import smallest_budget

PROMPTS = [name for name in policies.prompt_names() if name != "full"]
COMPOSED = [*PROMPTS, "h2o+ada+pyramid", "kvcrush(adakv)", "snapkv+critical+turns", "l2+nacl+ada"]


@pytest.mark.parametrize("name", COMPOSED)
@pytest.mark.parametrize("layers", [1, 2, 5, 32])
def test_layers_sum_to_the_budget(name: str, layers: int) -> None:
    """Every integer budget from the smallest to 4,096, for several lengths of a prompt."""
    policy = policies.prompt_policy(name)
    assert policy is not None
    least = smallest_budget(policy, None)
    for budget in range(least, 4097):
        for most in (budget, budget + 1, 2 * budget, 5000, 1 << 20):
            rows = policy.layers(layers, budget, most, least)
            assert len(rows) == layers
            assert sum(rows) == layers * budget
            assert min(rows) >= least
            assert max(rows) <= max(most, budget)


@pytest.mark.parametrize("name", COMPOSED)
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_heads_sum_to_the_layers_total(name: str, data: st.DataObject) -> None:
    """Whatever the scores and the free rows: exact, and no head gets more than it has."""
    policy = policies.prompt_policy(name)
    assert policy is not None
    heads, rows = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 120))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    scores = torch.rand(heads, rows, generator=generator)
    if data.draw(st.booleans()):
        scores = (scores * 4).floor()  # many ties
    free = torch.rand(heads, rows, generator=generator) < data.draw(st.floats(0.05, 1.0))
    total = data.draw(st.integers(0, heads * rows))
    pos = torch.arange(rows).expand(heads, rows)
    counts = policy.heads(scores, pos, free, total)
    assert sum(counts) == min(total, int(free.sum()))
    assert all(0 <= n <= m for n, m in zip(counts, free.sum(1).tolist(), strict=True))


def walk(prompt: str, step: str, budget: int, seed: int, turns: int) -> None:
    """Prompts and answers of random lengths: no head above its cap, every layer within its own."""
    run = engine(network(layers=2), prompt, step, budget)
    kv, generator = run.kv, torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(1, high, (1,), generator=generator))

    for turn in range(turns):
        run.prompt(ids(draw(90), seed=seed + turn))
        for token in ids(draw(12), seed=seed - turn):
            run.step(token)
        held, caps = kv.arena.held, kv.arena.cap
        if kv.step_policy is not None:
            assert bool((held <= caps).all())
        if kv.step_policy is not None and kv.prompt_policy is not None:
            assert int(caps.sum()) == held.numel() * budget
        for layer in range(2):
            for head in range(3):
                pos = kv.kept(layer, head)
                assert pos.unique().numel() == len(pos) == int(held[layer, head])
                assert int(pos[-1]) == kv.position - 1


@pytest.mark.parametrize(("prompt", "step"), PAIRS)
def test_random_walks(prompt: str, step: str) -> None:
    walk(prompt, step, 64, 1, 4)


@pytest.mark.soak
@pytest.mark.parametrize(("prompt", "step"), PAIRS)
def test_ten_thousand_walks(prompt: str, step: str) -> None:
    """About 10,000 sequences over all pairs."""
    for seed in range(10_000 // len(PAIRS) + 1):
        walk(prompt, step, 50 + seed % 30, seed, 3)


def lost(q: Tensor, k: Tensor, v: Tensor, w: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """(L1 change of a layer's output for one query, share of attention kept [H]).

    q [H, D]; k, v [H, N, D]; w [H, D, hidden]; keep bool [H, N].
    """
    p = (q[:, None] @ k.transpose(1, 2)).squeeze(1).mul(k.shape[-1] ** -0.5).softmax(-1)
    kept = p * keep
    mass = kept.sum(1)
    values = v @ w
    change = ((p - kept / mass[:, None])[:, :, None] * values).sum((0, 1))
    return change.abs().sum(), mass


@pytest.mark.parametrize("alpha", [0.0, 0.2, 1.0])
def test_the_loss_is_within_ada_kvs_bound(alpha: float) -> None:
    """Theorem 3.1: at most 2 C sum(1 - m_h), C the largest L1 length of a projected value."""
    generator = torch.Generator().manual_seed(11)
    for _ in range(200):
        heads, rows, size, hidden = 4, 60, 8, 24
        q = 2 * torch.randn(heads, size, generator=generator)
        k, v = torch.randn(2, heads, rows, size, generator=generator)
        w = torch.randn(heads, size, hidden, generator=generator)
        scores = (q[:, None] @ k.transpose(1, 2)).squeeze(1).mul(size**-0.5).softmax(-1)
        free = torch.ones(heads, rows, dtype=torch.bool)
        counts = adaptive_heads(alpha)(scores, torch.arange(rows).expand(heads, rows), free, 80)
        keep = torch.zeros_like(free)
        for h, n in enumerate(counts):
            keep[h, scores[h].topk(max(1, n)).indices] = True
        change, mass = lost(q, k, v, w, keep)
        bound = 2 * float((v @ w).abs().sum(-1).max()) * float((1 - mass).sum())
        assert float(change) <= bound + 1e-4
