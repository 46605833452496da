"""Sampling: what filters leave, and draws that follow the seed and the position alone."""

from __future__ import annotations

import pytest
import torch

from minikv.engine.sampling import Sampling, pick
from minikv.errors import NumericsError


def test_greedy_never_takes_a_padding_row() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 50.0])
    assert pick(logits, 3, Sampling(), 0, 0) == 1
    assert {pick(logits, 3, Sampling(1.0), 0, p) for p in range(200)} == {0, 1, 2}


def test_draws_follow_seed_and_position_alone() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    first = [pick(logits, 50, Sampling(1.0), 7, p) for p in range(40)]
    torch.manual_seed(123)
    assert first == [pick(logits, 50, Sampling(1.0), 7, p) for p in range(40)]
    assert first != [pick(logits, 50, Sampling(1.0), 8, p) for p in range(40)]


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(1.0, top_k=2), {0, 1}),
        (Sampling(1.0, top_p=0.5), {0}),
        (Sampling(1.0, top_p=0.65), {0, 1}),
        (Sampling(1.0, top_p=0.0), {0}),
        (Sampling(1.0, min_p=0.3), {0, 1}),
        (Sampling(1e-6), {0}),
        (Sampling(1.0), {0, 1, 2, 3}),
    ],
)
def test_filters_leave_what_they_promise(sampling: Sampling, allowed: set[int]) -> None:
    logits = torch.tensor([0.6, 0.2, 0.15, 0.05]).log()
    drawn = {pick(logits, 4, sampling, 3, p) for p in range(400)}
    assert drawn == allowed


def test_draws_have_the_right_frequencies() -> None:
    logits = torch.tensor([0.6, 0.2, 0.15, 0.05]).log()
    drawn = torch.tensor([pick(logits, 4, Sampling(1.0), 0, p) for p in range(4000)])
    shares = torch.bincount(drawn, minlength=4) / 4000
    assert torch.allclose(shares, torch.tensor([0.6, 0.2, 0.15, 0.05]), atol=0.03)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_logits_are_never_sampled(bad: float) -> None:
    logits = torch.zeros(4)
    logits[1] = bad
    with pytest.raises(NumericsError):
        pick(logits, 4, Sampling(), 0, 0)
    logits = torch.zeros(4)
    logits[3] = bad  # in the padding: not looked at
    assert pick(logits, 3, Sampling(), 0, 0) == 0
