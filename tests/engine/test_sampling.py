"""Sampling: what filters leave, and draws that follow the seed and the position alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small import VOCAB, engine, ids, network
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from minikv.engine.sampling import WINDOW, Sampling, penalized, pick
from minikv.errors import NumericsError
from minikv.kernels.dispatch import Kernels, choose

WHO = ("auto", "torch")


@pytest.fixture(params=WHO)
def ops(request: pytest.FixtureRequest) -> Kernels:
    """torch's kernels, and those of this CPU."""
    return choose(torch.device("cpu"), request.param, 64, torch.float32)[0]


def test_greedy_never_takes_a_padding_row(ops: Kernels) -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 50.0])
    assert pick(logits, 3, Sampling(), 0, 0, ops) == 1
    assert {pick(logits, 3, Sampling(1.0), 0, p, ops) for p in range(200)} == {0, 1, 2}


def test_draws_follow_seed_and_position_alone(ops: Kernels) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    first = [pick(logits, 50, Sampling(1.0), 7, p, ops) for p in range(40)]
    torch.manual_seed(123)
    assert first == [pick(logits, 50, Sampling(1.0), 7, p, ops) for p in range(40)]
    assert first != [pick(logits, 50, Sampling(1.0), 8, p, ops) for p in range(40)]


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
def test_filters_leave_what_they_promise(sampling: Sampling, allowed: Any, ops: Kernels) -> None:
    logits = torch.tensor([0.6, 0.2, 0.15, 0.05]).log()
    drawn = {pick(logits, 4, sampling, 3, p, ops) for p in range(400)}
    assert drawn == allowed


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_logits_are_never_sampled(bad: float, ops: Kernels) -> None:
    logits = torch.zeros(4)
    logits[1] = bad
    with pytest.raises(NumericsError):
        pick(logits, 4, Sampling(), 0, 0, ops)
    logits = torch.zeros(4)
    logits[3] = bad  # in the padding: not looked at
    assert pick(logits, 3, Sampling(), 0, 0, ops) == 0


@pytest.mark.parametrize("penalty", [0.5, 1.1, 2.0])
def test_the_penalty_is_that_of_transformers_over_the_last_tokens(penalty: float, ops: Any) -> None:
    made = torch.Generator().manual_seed(4)
    plain = 3 * torch.randn(60, generator=made)
    plain[:3] = torch.tensor([0.0, -0.0, 1.0])
    plain[55] = plain.max() + 0.01
    before = [55, *torch.randint(45, (200,), generator=made).tolist()]  # 55 is out of the window
    for recent in (before, before[:5], [0, 1, 2, 2]):
        window = torch.tensor([recent[-WINDOW:]])
        want = RepetitionPenaltyLogitsProcessor(penalty)(window, plain[None].clone())[0]
        got = penalized(plain, window[0], penalty)
        assert torch.equal(got, want)
        for sampling in (Sampling(repeat_penalty=penalty), Sampling(0.8, 9, 0.9, 0.01, penalty)):
            bare = replace(sampling, repeat_penalty=1.0)
            assert pick(plain, 60, sampling, 1, 7, ops, recent) == pick(want, 60, bare, 1, 7, ops)
            # The last tokens may be markers that are never chosen.
            assert pick(plain, 50, sampling, 1, 7, ops, [*recent, 50, 59, 99]) < 50
    assert plain[55] == penalized(plain, torch.tensor(before[-WINDOW:]), penalty)[55]


def test_the_kernels_draw_the_same() -> None:
    """C where there is a compiler."""
    both = [choose(torch.device("cpu"), name, 64, torch.float32)[0] for name in WHO]
    logits = 3 * torch.randn(5000, generator=torch.Generator().manual_seed(2))
    for sampling in (Sampling(0.7), Sampling(1.5, 40, 0.9, 0.05), Sampling(100.0, top_p=0.8)):
        how = logits, 4990, sampling, 1
        one, two = ([pick(*how, p, each) for p in range(200)] for each in both)
        assert one == two
        assert len(set(one)) > 10


def test_an_engine_draws_with_the_kernels_of_its_cache() -> None:
    class Always(Kernels):
        @staticmethod
        def drawn(logits: Tensor, *how: object) -> Tensor:
            return torch.tensor(len(logits) - 3)

    made = engine(network(layers=1))
    made.kv.use(Always())
    made.prompt(ids(5))
    assert made.next(1, VOCAB, Sampling(1.0), 0) == VOCAB - 3
