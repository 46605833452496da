"""A draw in every form: by hand, against exact sums, and C against torch in whole vocabularies."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from forms import Form, forms, needs_c
from tensors import randoms
from torch import Tensor

from minikv.kernels.sample import cpu as native
from minikv.kernels.sample import plain as sampling

CLOSE = 1e-9
"""Points this close to an edge may fall on its other side: masses are rounded."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What a draw is made of; see `kernels.sample.plain.drawn`."""

    logits: Tensor
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    point: float = 0.5

    def by(self, drawn: Any) -> int:
        """The token, by some `drawn`."""
        point = torch.tensor(self.point, dtype=torch.float64)
        how = (self.temperature, self.top_k, self.top_p, self.min_p)
        return int(drawn(self.logits, *how, point))


def oracle(draw: Draw) -> tuple[int, float]:
    """The token, and how close the nearest edge is at which a decision was made."""
    best, points = max(draw.logits.tolist()), draw.logits.tolist()
    order = sorted(range(len(points)), key=lambda i: (-points[i], i))
    chance = {i: math.exp((points[i] - best) / draw.temperature) for i in order}
    if draw.top_k:
        order = order[: draw.top_k]
    whole, before = sum(Fraction(chance[i]) for i in order), Fraction(0)
    kept, edges = [], [1.0]
    for i in order:
        share = float(before / whole)
        if kept and (share >= draw.top_p or chance[i] < draw.min_p):
            break
        kept.append(i)
        before += Fraction(chance[i])
    if draw.top_p < 1.0:
        before, shares = Fraction(0), []
        for i in order:
            shares.append(abs(float(before / whole) - draw.top_p))
            before += Fraction(chance[i])
        edges += shares[1:]
    edges += [abs(chance[i] - draw.min_p) for i in order if draw.min_p and chance[i] < 1.0]
    target = Fraction(draw.point) * sum(Fraction(chance[i]) for i in kept)
    end, found = Fraction(0), None
    for i in kept:
        end += Fraction(chance[i])
        edges.append(abs(float((end - target) / whole)))
        if found is None and end > target:
            found = i
    assert found is not None
    return found, min(edges)


def random_draws(count: int, seed: int, sizes: tuple[int, ...]) -> Iterator[Draw]:
    """Any settings, and logits of all kinds: spread, close, of few values, with outliers."""
    dice = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        size = dice.choice(sizes)
        logits = torch.randn(size, generator=generator)
        kind = dice.randrange(7)
        if kind < 3:
            logits *= (0.01, 3.0, 30.0)[kind]
        elif kind == 3:  # many are equal, and 0 has two signs
            logits = (2 * logits).round() * dice.choice((0.5, -0.5))
        elif kind == 4:  # differ in the last bits only
            logits = 7.0 + logits * 1e-6
        elif kind == 5:  # far from each other
            logits = logits.sign() * (10 * logits).exp()
        else:
            logits = (3 * logits).bfloat16().float()
            logits[dice.randrange(size)] = dice.choice((-1e38, 1e38, 20.0))
        yield Draw(
            logits,
            dice.choice((1e-6, 0.05, 0.7, 1.0, 1.0, 2.0, 100.0)),
            dice.choice((0, 0, 0, 1, 2, 40, size, 10**9)),
            dice.choice((1.0, 1.0, 0.0, 0.1, 0.5, 0.9, 0.999, dice.random())),
            dice.choice((0.0, 0.0, 1e-9, 0.05, 0.3, 1.0, dice.random())),
            dice.choice((0.0, 1.0 - 2**-53, *(dice.random() for _ in range(6)))),
        )


MANY = 10_000
LAST = 1.0 - 2**-53
"""The largest point there is."""
SHARES = torch.tensor([0.15, 0.6, 0.05, 0.2]).log()
"""In order: tokens 1, 3, 0, 2."""


@pytest.mark.parametrize("form", forms("drawn"))
@pytest.mark.parametrize(
    ("point", "token"),
    [(0.0, 1), (0.59, 1), (0.61, 3), (0.79, 3), (0.81, 0), (0.94, 0), (0.96, 2), (LAST, 2)],
)
def test_the_token_at_a_point(form: Form, point: float, token: int) -> None:
    assert Draw(SHARES, point=point).by(form) == token


@pytest.mark.parametrize("form", forms("drawn"))
@pytest.mark.parametrize(
    ("how", "last", "kept"),
    [
        ({"top_k": 1}, 1, 0.6),
        ({"top_k": 3}, 0, 0.95),
        ({"top_k": 4}, 2, 1.0),
        ({"top_k": 1 << 31}, 2, 1.0),
        ({"top_p": 0.0}, 1, 0.6),
        ({"top_p": 0.59}, 1, 0.6),
        ({"top_p": 0.61}, 3, 0.8),
        ({"top_p": 0.79}, 3, 0.8),
        ({"top_p": 0.81}, 0, 0.95),
        ({"top_k": 2, "top_p": 0.74}, 1, 0.6),  # of 0.8, 0.6 is 0.75
        ({"top_k": 2, "top_p": 0.76}, 3, 0.8),
        ({"min_p": 0.34}, 1, 0.6),
        ({"min_p": 0.33}, 3, 0.8),
        ({"min_p": 0.24}, 0, 0.95),
        ({"min_p": 1.0}, 1, 0.6),
        ({"top_p": 0.61, "min_p": 0.24}, 3, 0.8),
        ({"top_p": 0.81, "min_p": 0.33}, 3, 0.8),
        ({"top_k": 2, "min_p": 0.24}, 3, 0.8),
        ({"temperature": 1e-6}, 1, 1.0),
        ({"temperature": 5e-324}, 1, 1.0),
    ],
)
def test_what_the_filters_leave(form: Form, how: dict[str, float], last: int, kept: float) -> None:
    """The last token that can be drawn, and where the first one ends."""
    how = {"temperature": 1.0, **how}
    found = Draw(SHARES, **how, point=LAST).by(form)  # type: ignore[arg-type]
    assert found == last
    if last != 1:
        for point, token in ((0.6 / kept - 0.001, 1), (0.6 / kept + 0.001, 3)):
            assert Draw(SHARES, **how, point=point).by(form) == token  # type: ignore[arg-type]


@pytest.mark.parametrize("form", forms("drawn"))
@pytest.mark.parametrize("size", [1, 4, 64, 1 << 14, 300_000])
def test_equal_logits_have_exact_edges(form: Form, size: int) -> None:
    logits = torch.full((size,), -3.25)
    for i in {0, 1, size // 4, size // 2, size - 1}:
        if i < size:
            assert Draw(logits, point=i / size).by(form) == i
            assert Draw(logits, top_k=i + 1, point=LAST).by(form) == i
    assert Draw(logits, point=LAST).by(form) == size - 1
    assert Draw(logits, top_p=0.5, point=LAST).by(form) == max(size // 2 - 1, 0)


@pytest.mark.parametrize("vocab", [1, 2, 32_000, (1 << 18) - 1, 1 << 18, 300_000, 1 << 30])
def test_no_sum_of_masses_is_too_large(vocab: int) -> None:
    assert sampling.scale(vocab) == 2**44 or vocab >= 1 << 18
    assert vocab * int(sampling.scale(vocab)) <= 1 << 62


@pytest.mark.parametrize("form", forms("drawn"))
def test_logits_that_are_far_from_each_other(form: Form) -> None:
    """Also by more than float32 can say."""
    most = torch.finfo(torch.float32).max
    for temperature in (5e-324, 1e-300, 1e-6, 1.0, 100.0):
        for point in (0.0, 0.5, LAST):
            draw = Draw(torch.tensor([-most, most, 0.0]), temperature, point=point)
            assert draw.by(form) == 1
            near = Draw(torch.tensor([-1e-45, 0.0]), temperature, point=point)
            assert near.by(form) == near.by(sampling.drawn)


@pytest.mark.parametrize("form", forms("drawn"))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("others", [0.0, math.nan, -math.inf])
def test_of_logits_that_are_not_finite_any_token(form: Form, bad: float, others: float) -> None:
    logits = torch.full((40,), others)
    logits[20] = bad
    for top_k, top_p, min_p in ((0, 1.0, 0.0), (3, 0.5, 0.0), (50, 0.9, 0.1)):
        assert 0 <= Draw(logits, 0.7, top_k, top_p, min_p).by(form) < 40


@pytest.mark.parametrize("form", forms("drawn"))
def test_random_draws_are_those_of_exact_sums(form: Form, part: float) -> None:
    count, near = int(part * MANY), 0
    for draw in random_draws(count, 1, (1, 2, 17, 100)):
        token, edge = oracle(draw)
        near += edge < CLOSE
        assert draw.by(form) == token or edge < CLOSE, draw
    assert near < count / 4


def chosen(how: tuple[float, int, float, float] | None, logits: Tensor, at: int = 0) -> list[int]:
    """Token, token again, and whether all logits are finite; with points 0, 0.7 and the last one
    for the positions from 10 on."""
    token, found = torch.tensor([7]), torch.tensor([7, 7])
    if how is None:
        sampling.greedy(logits, token, found)
    else:
        draws = torch.tensor([0.0, 0.7, LAST], dtype=torch.float64)
        first, position = torch.tensor(10), torch.tensor(at)
        sampling.sample(logits, *how, draws, first, position, token, found)
    return [*token.tolist(), *found.tolist()]


def test_the_first_of_the_largest_logits_and_the_point_of_each_position() -> None:
    assert chosen(None, torch.tensor([1.0, 3.0, 2.0, 3.0])) == [1, 1, 1]
    for at, token in ((3, 1), (9, 1), (10, 3), (11, 2), (99, 2)):
        assert chosen((1.0, 0, 1.0, 0.0), SHARES, at) == [token, token, 1], at


@pytest.mark.parametrize("how", [None, (0.7, 3, 0.9, 0.1)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_told(how: Any, bad: float) -> None:
    logits = torch.zeros(40)
    logits[20] = bad
    token, again, finite = chosen(how, logits)
    assert 0 <= token < 40
    assert (again, finite) == (token, 0)


def agree(draw: Draw) -> bool:
    """Whether both draw the same token. If not, the point must lie within rounding of an edge."""
    if draw.by(native.drawn) == draw.by(sampling.drawn):
        return True
    assert oracle(draw)[1] < CLOSE, draw
    return False


@needs_c
@pytest.mark.parametrize("sizes", [(1, 2, 3, 15, 64, 65, 130), (1023, 1025, 4099)])
def test_random_draws(sizes: tuple[int, ...], part: float) -> None:
    """Exponentials differ in the last places only, so hardly a token does."""
    count = int(2 * part * MANY)
    differ = sum(not agree(draw) for draw in random_draws(count, len(sizes), sizes))
    assert differ <= 1 + count / 2000


@needs_c
@pytest.mark.parametrize("vocab", [32_000, 128_256])
@pytest.mark.parametrize(
    "how",
    [{}, {"top_k": 40}, {"top_k": 20_000}, {"top_p": 0.9}, {"min_p": 0.05}, {"temperature": 2.0}],
    ids=str,
)
def test_whole_vocabularies(vocab: int, how: dict[str, float]) -> None:
    points = torch.rand(6, generator=torch.Generator().manual_seed(vocab), dtype=torch.float64)
    how = {"temperature": 0.7, **how}
    for logits in (randoms(1, vocab, by=3.0), randoms(2, vocab, by=0.1).bfloat16().float()):
        for point in (*points.tolist(), LAST):
            agree(Draw(logits, point=point, **how))  # type: ignore[arg-type]


@needs_c
@pytest.mark.parametrize("temperature", [0.01, 1.0, 100.0])
def test_one_bin_that_holds_nearly_all(temperature: float) -> None:
    """One logit is far from all others, which differ in all of their bits or in the last ones."""
    for outlier in (-1e30, -1e4):
        for logits in (randoms(1, 5000, by=1e-3), 1.0 + randoms(2, 5000, by=1e-6)):
            logits[1234] = outlier
            for top_k, top_p, point in ((0, 1.0, 0.4), (2500, 1.0, LAST), (0, 0.3, LAST)):
                draw = Draw(logits, temperature, top_k, top_p, point=point)
                assert draw.by(native.drawn) == draw.by(sampling.drawn)


@needs_c
def test_tokens_without_mass_are_counted() -> None:
    """top_k ends among tokens that are too unlikely to be drawn."""
    logits = torch.cat((torch.zeros(2), torch.full((5000,), -80.0)))
    for top_k in (1, 2, 3, 4000, 5002):
        for point, token in ((0.0, 0), (LAST, min(top_k, 2) - 1)):
            assert Draw(logits, top_k=top_k, point=point).by(native.drawn) == token


@needs_c
def test_other_tensors_are_torchs() -> None:
    """Every other logit, and float64."""
    logits = randoms(3, 200)
    for other in (logits[::2], logits.double()):
        draw = Draw(other, 0.7)
        assert draw.by(native.drawn) == draw.by(sampling.drawn)
