"""Counting on the device gives what counting on the host gives, ties and remainders included."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minikv import allocate, policy
from minikv.policies import adakv

few = st.integers(0, 9)


@st.composite
def lists(draw: st.DrawFn, count: int) -> list[list[int]]:
    heads = draw(st.integers(1, 6))
    return [draw(st.lists(few, min_size=heads, max_size=heads)) for _ in range(count)]


@st.composite
def rows(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, int]:
    """Scores with many ties, positions in any order, rows that are free, and a total."""
    heads, count = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    flat = draw(st.lists(st.sampled_from([-1.5, -0.0, 0.0, 0.25, 0.25, 3.0, 1e-30]),
                         min_size=heads * count, max_size=heads * count))  # fmt: skip
    free = draw(st.lists(st.booleans(), min_size=heads * count, max_size=heads * count))
    pos = [draw(st.permutations(range(count))) for _ in range(heads)]
    total = draw(st.integers(0, heads * count))
    shape = (heads, count)
    return torch.tensor(flat).view(shape), torch.tensor(pos), torch.tensor(free).view(shape), total


@settings(deadline=None, max_examples=80)
@given(lists(3), st.integers(1, 7))
def test_shares(case: list[list[int]], parts: int) -> None:
    wish, most, _ = case
    total = sum(wish)  # wishes are parts x wish / parts
    got = allocate.share(
        torch.tensor(wish) * parts, parts, torch.tensor(most), torch.tensor(total)
    )
    assert got.tolist() == policy.share([Fraction(w) for w in wish], most, total)
    uneven = [Fraction(w, parts) for w in wish]
    if sum(uneven).denominator == 1:
        total = int(sum(uneven))
        got = allocate.share(torch.tensor(wish), parts, torch.tensor(most), torch.tensor(total))
        assert got.tolist() == policy.share(uneven, most, total)


@settings(deadline=None, max_examples=80)
@given(lists(1), st.integers(0, 60))
def test_fill(case: list[list[int]], total: int) -> None:
    assert allocate.fill(torch.tensor(case[0]), total).tolist() == policy.fill(case[0], total)


@settings(deadline=None, max_examples=120)
@given(lists(3), st.integers(1, 2))
def test_spread(case: list[list[int]], least: int) -> None:
    counts, sure, more = case
    free = [n + m for n, m in zip(counts, more, strict=True)]
    host = policy.spread(counts, sure, free, least)
    got = allocate.spread(*(torch.tensor(x) for x in (counts, sure, free)), least)
    assert got.tolist() == host
    assert sum(host) == sum(counts)
    assert all(0 <= n <= m for n, m in zip(host, free, strict=True))
    have = [n + m for n, m in zip(host, sure, strict=True)]
    can = [min(least, n + m) for n, m in zip(sure, free, strict=True)]
    poor = any(n < m for n, m in zip(have, can, strict=True))
    assert not poor or all(n == 0 or m <= least for n, m in zip(host, have, strict=True))


@settings(deadline=None, max_examples=80)
@given(rows(), st.lists(st.integers(0, 14), min_size=5, max_size=5))
def test_best(case: tuple[Tensor, Tensor, Tensor, int], counts: list[int]) -> None:
    scores, pos, free, _ = case
    counts = counts[: len(free)]
    got = allocate.best(scores, pos, free, torch.tensor(counts), max(counts))
    for h, count in enumerate(counts):
        assert torch.equal(got[h], policy.best(scores[h], pos[h], free[h], count))


@settings(deadline=None, max_examples=80)
@given(rows(), st.sampled_from([0.0, 0.2, 0.25, 0.333, 1.0]), st.integers(0, 9))
def test_heads(case: tuple[Tensor, Tensor, Tensor, int], alpha: float, slack: int) -> None:
    scores, pos, free, total = case
    want = adakv.wanted(scores, pos, free, total)
    some = torch.tensor(total), total + slack
    assert allocate.wanted(scores, pos, free, *some).tolist() == want
    for rounding in ("exact", "official"):
        host = adakv.adaptive_heads(alpha, rounding)(scores, pos, free, total)
        device = allocate.adaptive_heads(alpha, rounding)
        assert device is not None
        assert device(scores, pos, free, *some).tolist() == host
    even = allocate.even_heads(scores, pos, free, *some)
    assert even.tolist() == policy.even_heads(scores, pos, free, total)


def test_an_alpha_of_many_digits_is_counted_on_the_host() -> None:
    assert allocate.adaptive_heads(0.123456789) is None


@pytest.mark.parametrize("heads", [8, 32])
def test_large_numbers_stay_exact(heads: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    need = torch.randint(0, 300_000, (heads,), generator=generator)
    total = int(need.sum())
    most = need + torch.randint(0, 5_000, (heads,), generator=generator)
    a = Fraction("0.1234567")
    wish = need * ((a.denominator - a.numerator) * heads) + a.numerator * total
    got = allocate.share(wish, a.denominator * heads, most, torch.tensor(total))
    even = Fraction(total, heads)
    want = policy.share([(1 - a) * int(n) + a * even for n in need], most.tolist(), total)
    assert got.tolist() == want
