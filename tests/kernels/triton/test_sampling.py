"""The next token in Triton, as torch finds it, in guarded memory.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_device import guarded, kernel, on_device, randoms, untouched

from minikv.kernels.torch import sampling as plain_torch

pytest.importorskip("triton", reason="no Triton on this system")


def greedy(module: Any, logits: Tensor, **block: int) -> list[Tensor]:
    """Token, what is found, and whether all logits are finite."""
    written = [guarded(t) for t in (torch.tensor([7]), torch.tensor([7, 7]), torch.tensor(False))]
    module.greedy(guarded(logits), *written, **block)
    assert all(untouched(t) for t in written)
    return [t.cpu() for t in written]


@on_device
@pytest.mark.parametrize("size", [1, 15, 16, 17, 255, 700])
@pytest.mark.parametrize("kinds", [3, 10**6])
def test_the_first_of_the_largest_logits(size: int, kinds: int) -> None:
    """In blocks of 16; with few kinds of logits many are equal."""
    for seed in range(3):
        logits = torch.randint(-kinds, kinds, (size,), generator=randoms(seed)).float() / 3
        got = greedy(kernel("triton.sampling"), logits, block=16)
        want = greedy(plain_torch, logits)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert got[0].item() == int((logits == logits.max()).nonzero()[0])
        assert got[1].tolist() == [got[0].item(), 1]


@on_device
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 20, 39])
@pytest.mark.parametrize("others", [0.0, math.nan, -math.inf])
def test_logits_that_are_not_finite(bad: float, at: int, others: float) -> None:
    """They are told, and the token is one that there is."""
    logits = torch.full((40,), others)
    logits[at] = bad
    for module, more in ((kernel("triton.sampling"), {"block": 16}), (plain_torch, {})):
        token, found, finite = greedy(module, logits, **more)
        assert 0 <= int(token) < 40
        assert found.tolist() == [int(token), 0]
        assert not bool(finite)
