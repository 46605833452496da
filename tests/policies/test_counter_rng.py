"""What random draws must look like."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minikv.policies import counter_rng
from minikv.policies.counter_rng import gumbel, uniform


def test_gumbel_top_k_draws_without_replacement() -> None:
    """The first of two is drawn with p, and the second as successive draws would."""
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    trials = 20_000
    keys = p.log() + gumbel(uniform(9, torch.arange(trials)[:, None], torch.arange(4)))
    order = keys.argsort(1, descending=True)[:, :2]
    first = torch.bincount(order[:, 0], minlength=4) / trials
    assert torch.allclose(first, p, atol=0.012)
    both = torch.bincount(order.flatten(), minlength=4) / trials
    want = [
        float(p[i] + sum(p[j] * p[i] / (1 - p[j]) for j in range(4) if j != i)) for i in range(4)
    ]
    assert torch.allclose(both, torch.tensor(want), atol=0.012)


def test_draws_are_splitmix64_to_the_last_bit() -> None:
    """The same for ever, so that an answer can be repeated: against whole numbers of Python."""
    word = (1 << 64) - 1

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & word
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & word
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & word
        return x ^ (x >> 31)

    keys = [*range(20), 1 << 40, -1]
    for seed in (0, 7, -3):
        got = uniform(seed, 5, torch.tensor(keys))
        for key, found in zip(keys, got.tolist(), strict=True):
            state = seed & word
            for one in (5, key):
                state = mix(state ^ mix(one & word))
            assert found == ((state >> 41) + 0.5) / (1 << 23)


@pytest.mark.parametrize("seed", [0, 7, (1 << 31) - 1])
def test_the_extreme_draws_are_inside_the_unit_interval(seed: int, monkeypatch: Any) -> None:
    """0 < u < 1 for the 64 bits that are all 0 and all 1: no logarithm is infinite."""
    monkeypatch.setattr(counter_rng, "_mix", lambda bits: bits)
    drawn = uniform(seed, torch.tensor([seed, ~seed]))
    low, high = drawn.tolist()
    assert 0.0 < low < 2**-20
    assert 1 - 2**-20 < high < 1.0
    assert bool(torch.isfinite(gumbel(drawn)).all())
