"""The next token in Triton, as torch finds it, in guarded memory.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from pairwise import pairwise, some_by_day
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


SETTINGS = [
    # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (0.7, 40, 1.0, 0.0),
    (1.3, 0, 0.9, 0.0),
    (100.0, 0, 0.55, 0.0),
    (1e-6, 0, 1.0, 0.0),
    (0.8, 0, 1.0, 0.07),
    (0.8, 1, 0.3, 0.5),
    (2.0, 50, 0.9, 0.05),
    (3.0, 10**6, 0.0, 0.0),
    (0.9, 17, 0.99, 1.0),
]


def sampled(
    module: Any, logits: Tensor, how: tuple[Any, ...], at: int, **block: int
) -> list[Tensor]:
    """As `greedy`; the point is that of position `at` + 1, of 50 from position 10 on."""
    written = [guarded(t) for t in (torch.tensor([7]), torch.tensor([7, 7]), torch.tensor(False))]
    draws = torch.rand(50, dtype=torch.float64, generator=randoms(99))
    draws[:3] = torch.tensor((0.0, 1.0 - 2**-53, 0.5), dtype=torch.float64)
    places = (torch.tensor(10), torch.tensor(at))
    module.sample(guarded(logits), *how, *map(guarded, (draws, *places)), *written, **block)
    assert all(untouched(t) for t in written)
    return [t.cpu() for t in written]


@on_device
@pytest.mark.parametrize(
    ("how", "size"),
    some_by_day([*product(SETTINGS, (1, 33, 170))], lambda case: case[1] == 33),
    ids=str,
)
def test_the_token_that_is_drawn(how: tuple[Any, ...], size: int) -> None:
    """That of torch, in tiles of 16, also at both ends and where many logits are equal."""
    for seed in (0, 2):
        logits = 3 * torch.randn(size, generator=randoms(seed))
        if seed == 2:
            logits = logits.round()
        for at in (3, 10, 11 + 7 * seed, 99):
            got = sampled(kernel("triton.sampling"), logits, how, at, block=16)
            want = sampled(plain_torch, logits, how, at)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (seed, at)


MOST = torch.finfo(torch.float32).max


def drawn_from(kind: str, size: int, random: torch.Generator) -> Tensor:
    """Logits that differ in their leading bits, or only in their last, or hardly at all."""
    near = torch.randint(-3, 4, (size,), generator=random)
    return {
        "any": 3 * torch.randn(size, generator=random),
        "bfloat16": (9 * torch.randn(size, generator=random)).bfloat16().float(),
        "neighbours": 5 + near * 2.0**-21,
        "tiny": near * 1e-45,
        "zeros": torch.where(near > 0, 0.0, -0.0),
        "equal": torch.full((size,), -3.25),
        "huge": torch.where(near > 0, MOST, -MOST),
    }[kind]


KINDS = ("any", "bfloat16", "neighbours", "tiny", "zeros", "equal", "huge")
FILTERED = pairwise(
    KINDS,
    (1, 33, 100),  # logits
    (5e-324, 0.7, 1e9),  # temperature
    (0, 4, 34),  # top_k
    (1.0, 0.0, 0.9, 1 - 2**-53),  # top_p
    (0.0, 0.3),  # min_p
)


@on_device
@pytest.mark.parametrize("at", [10, 11, 30])  # the last token, one at an edge, and another
def test_the_token_behind_any_two_filters(at: int) -> None:
    for seed, (kind, size, *how) in enumerate(FILTERED):
        logits = drawn_from(str(kind), int(str(size)), randoms(seed))
        got = sampled(kernel("triton.sampling"), logits, tuple(how), at, block=32)
        want = sampled(plain_torch, logits, tuple(how), at)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (kind, size, how)


@on_device
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_draw_from_logits_that_are_not_finite(bad: float) -> None:
    logits = torch.zeros(40)
    logits[20] = bad
    for how in SETTINGS:
        for module, more in ((kernel("triton.sampling"), {"block": 16}), (plain_torch, {})):
            token, found, finite = sampled(module, logits, how, 15, **more)
            assert 0 <= int(token) < 40
            assert found.tolist() == [int(token), 0]
            assert not bool(finite)
