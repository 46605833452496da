"""A draw in C against the one in torch: any settings, edges, and logits that fill one bin."""

from __future__ import annotations

import math

import pytest
import torch
from drawing import randoms
from draws import CLOSE, Draw, oracle, random_draws

from minikv.kernels.native import build
from minikv.kernels.sample import cpu as native
from minikv.kernels.sample import plain as plain_torch

pytestmark = pytest.mark.skipif(build.find() is None, reason="no C compiler on this system")
MANY = 20_000
LAST = 1.0 - 2**-53
"""The largest point there is."""


def agree(draw: Draw) -> bool:
    """Whether both draw the same token. If not, the point must lie within rounding of an edge."""
    if draw.by(native.drawn) == draw.by(plain_torch.drawn):
        return True
    assert oracle(draw)[1] < CLOSE, draw
    return False


@pytest.mark.parametrize("sizes", [(1, 2, 3, 15, 64, 65, 130), (1023, 1025, 4099)])
def test_random_draws(sizes: tuple[int, ...], part: float) -> None:
    """Exponentials differ in the last places only, so hardly a token does."""
    count = int(part * MANY)
    differ = sum(not agree(draw) for draw in random_draws(count, len(sizes), sizes))
    assert differ <= 1 + count / 2000


@pytest.mark.parametrize("vocab", [32_000, 128_256])
@pytest.mark.parametrize(
    "how",
    [{}, {"top_k": 40}, {"top_k": 20_000}, {"top_p": 0.9}, {"min_p": 0.05}, {"temperature": 2.0}],
    ids=str,
)
def test_whole_vocabularies(vocab: int, how: dict[str, float]) -> None:
    points = torch.rand(12, generator=torch.Generator().manual_seed(vocab), dtype=torch.float64)
    how = {"temperature": 0.7, **how}
    for logits in (randoms(1, vocab, by=3.0), randoms(2, vocab, by=0.1).bfloat16().float()):
        for point in (*points.tolist(), LAST):
            agree(Draw(logits, point=point, **how))  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 4, 64, 1 << 14, 300_000])
def test_equal_logits_have_exact_edges(size: int) -> None:
    """All are in one bin. Above 2^18 the scale is a smaller one."""
    logits = torch.full((size,), -3.25)
    for i in {0, 1, size // 4, size // 2, size - 1}:
        if i < size:
            assert Draw(logits, point=i / size).by(native.drawn) == i
            assert Draw(logits, top_k=i + 1, point=LAST).by(native.drawn) == i
    assert Draw(logits, top_p=0.5, point=LAST).by(native.drawn) == max(size // 2 - 1, 0)


@pytest.mark.parametrize("temperature", [0.01, 1.0, 100.0])
def test_one_bin_that_holds_nearly_all(temperature: float) -> None:
    """One logit is far from all others, which differ in all of their bits or in the last ones."""
    for outlier in (-1e30, -1e4):
        for logits in (randoms(1, 5000, by=1e-3), 1.0 + randoms(2, 5000, by=1e-6)):
            logits[1234] = outlier
            for top_k, top_p, point in ((0, 1.0, 0.4), (2500, 1.0, LAST), (0, 0.3, LAST)):
                draw = Draw(logits, temperature, top_k, top_p, point=point)
                assert draw.by(native.drawn) == draw.by(plain_torch.drawn)


def test_of_equal_logits_the_smaller_id_comes_first() -> None:
    """Also of 0 and -0."""
    logits = torch.tensor([0.0, -0.0, 5.0, 0.0, 5.0, -0.0])
    for i, token in enumerate([2, 4, 0, 1, 3, 5]):
        draw = Draw(logits, 1e9, point=i / 6 + 1e-6)
        assert draw.by(native.drawn) == token


def test_logits_that_are_far_from_each_other() -> None:
    most = torch.finfo(torch.float32).max
    for temperature in (5e-324, 1e-300, 1e-6, 1.0, 100.0):
        for point in (0.0, 0.5, LAST):
            assert Draw(torch.tensor([-most, most, 0.0]), temperature, point=point).by(
                native.drawn
            ) == (1)
            assert Draw(torch.tensor([-1e-45, 0.0]), temperature, point=point).by(
                native.drawn
            ) == Draw(torch.tensor([-1e-45, 0.0]), temperature, point=point).by(plain_torch.drawn)


def test_tokens_without_mass_are_counted() -> None:
    """top_k ends among tokens that are too unlikely to be drawn."""
    logits = torch.cat((torch.zeros(2), torch.full((5000,), -80.0)))
    for top_k in (1, 2, 3, 4000, 5002):
        for point, token in ((0.0, 0), (LAST, min(top_k, 2) - 1)):
            assert Draw(logits, top_k=top_k, point=point).by(native.drawn) == token


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("others", [0.0, math.nan, -math.inf])
def test_of_logits_that_are_not_finite_any_token(bad: float, others: float) -> None:
    logits = torch.full((40,), others)
    logits[20] = bad
    for top_k, top_p, min_p in ((0, 1.0, 0.0), (3, 0.5, 0.0), (50, 0.9, 0.1)):
        assert 0 <= Draw(logits, 0.7, top_k, top_p, min_p).by(native.drawn) < 40


def test_other_tensors_are_torchs() -> None:
    """Every other logit, and float64."""
    logits = randoms(3, 200)
    for other in (logits[::2], logits.double()):
        draw = Draw(other, 0.7)
        assert draw.by(native.drawn) == draw.by(plain_torch.drawn)
