"""What random draws must look like."""

from __future__ import annotations

import torch

from minikv.policies.counter_rng import gumbel, uniform


def test_uniform_is_uniform_and_keyed() -> None:
    n = 40_000
    draws = uniform(1, 2, torch.arange(n))
    counts = torch.histc(draws, 20, 0.0, 1.0)
    chi = float(((counts - n / 20) ** 2 / (n / 20)).sum())
    assert chi < 43.8  # 19 degrees of freedom, p = 0.001
    assert float(draws.min()) > 0.0
    assert float(draws.max()) < 1.0
    for other in (uniform(2, 2, torch.arange(n)), uniform(1, 3, torch.arange(n)), draws.roll(1)):
        assert abs(float(torch.corrcoef(torch.stack((draws, other)))[0, 1])) < 0.02
    assert torch.equal(uniform(1, 2, torch.arange(n))[77], uniform(1, 2, torch.tensor(77)))


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
