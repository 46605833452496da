"""The arithmetic of choosing rows in Triton, as torch does it, to the bit, in guarded memory.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

import math

import pytest
import torch
from pairwise import some_by_day
from torch import Tensor
from triton_device import close, draw, guarded, kernel, on_device, randoms

from minikv.kernels.torch import selection as plain_torch

pytest.importorskip("triton", reason="no Triton on this system")

ROWS = [1, 40, 1300]


def counts(seed: int, heads: int, most: int) -> Tensor:
    return torch.randint(0, most + 1, (heads,), generator=randoms(seed))


def rows(heads: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores with many ties, positions in any order, some of which are no rows, and free rows."""
    scores = draw(1, (heads, count), torch.float32).mul(4).round() / 4
    scores[:, ::7] = 0.0
    scores[:, 3::7] = -0.0
    scores[:, 5::11] = math.inf
    scores[:, 6::11] = -math.inf
    pos = torch.stack(
        [torch.randperm(2 * count, generator=randoms(h))[:count] for h in range(heads)]
    )
    pos[:, 2::5] = -1
    free = (torch.rand((heads, count), generator=randoms(9)) < 0.7) & (pos >= 0)
    free[0] = False
    return scores, pos, free


def same(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    assert torch.equal(got.cpu(), want)


@on_device
@pytest.mark.parametrize("count", ROWS)
def test_which_rows_stay_and_which_compete(count: int) -> None:
    _, pos, _ = rows(3, count)
    line = torch.arange(count).expand(3, count)  # of a first prompt: all heads alike
    made = kernel("triton.selection")
    for ends in ((4, count, 0), (4, count, count // 2), (0, 0, 0), (2, count - 3, 0)):
        for given in (pos, line):
            got, want = made.divide(guarded(given), *ends), plain_torch.divide(given, *ends)
            for mine, theirs in zip(got, want, strict=True):
                same(mine, theirs)
            for total in (0, count, 7 * count):
                left = plain_torch.remaining(total, want[2][0])
                same(made.remaining(total, guarded(want[2])[0]), left)


@on_device
@pytest.mark.parametrize("count", ROWS)
def test_the_best_rows(count: int) -> None:
    scores, pos, free = rows(4, count)
    made, there = kernel("triton.selection"), [guarded(t) for t in (scores, pos, free)]
    same(made.order_key(*there), plain_torch.order_key(scores, pos, free))
    most = count // 2
    wish = counts(1, 4, most)
    same(
        made.best(*there, guarded(wish), most),
        plain_torch.best(scores, pos, free, wish, most),
    )
    alike = torch.tensor([most]).expand(4)
    same(made.best(*there, alike, most), plain_torch.best(scores, pos, free, alike, most))
    key, more = plain_torch.order_key(scores, pos, free), draw(2, pos.shape, torch.float32) > 0
    same(
        made.best(*there, guarded(wish), most, guarded(key), guarded(more)),
        plain_torch.best(scores, pos, free, wish, most) | more,
    )
    for total in (0, 1, count, 3 * count):
        some = torch.tensor(total)
        same(
            made.wanted(*there, guarded(some), max(1, total)),
            plain_torch.wanted(scores, pos, free, some, max(1, total)),
        )
        same(
            made.wanted(*there, guarded(some), max(1, total), guarded(key)),
            plain_torch.wanted(scores, pos, free, some, max(1, total), key),
        )


def chosen_alike(
    scores: Tensor, pos: Tensor, free: Tensor, wish: Tensor, totals: list[int]
) -> None:
    """By `best` and `wanted`, as in torch."""
    made, there = kernel("triton.selection"), [guarded(t) for t in (scores, pos, free)]
    most = max(1, int(wish.max()))
    want = plain_torch.best(scores, pos, free, wish, most)
    same(made.best(*there, guarded(wish), most), want)
    for total in totals:
        some, limit = torch.tensor(total), max(1, total)
        want = plain_torch.wanted(scores, pos, free, some, limit)
        same(made.wanted(*there, guarded(some), limit), want)


@on_device
@pytest.mark.parametrize("few", [True, False], ids=["one program", "many programs"])
@pytest.mark.parametrize("count", [1, 40, 2100])
def test_the_edge_is_found(count: int, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of scores with and without ties, of equal scores alone, with counts from none to more than
    there are."""
    made = kernel("triton.selection")
    for name in ("_FEW", "_FEW_IN_ALL"):
        monkeypatch.setattr(made, name, 1 << 20 if few else 0)
    heads = 4
    tied, pos, free = rows(heads, count)
    free[1] = pos[1] >= 0  # many of one head, and none of the first
    have = int(free.sum())
    wish = torch.tensor([count // 2, count // 2, 0, count + 5])
    totals = [0, 1, have // 3, have - 1, have, have + 7]
    chosen_alike(tied, pos, free, wish, totals)
    chosen_alike(tied, pos, free & False, wish, totals[:2])
    chosen_alike(torch.zeros_like(tied), pos, free, wish, totals[2:4])
    plain = draw(8, tied.shape, torch.float32)
    plain[:, 1::3] = math.nan
    plain[:, 2::9] = -math.nan
    far = torch.where(pos < 0, pos, pos + 2**31 - 3 * count)  # the last positions of an int32
    chosen_alike(plain, far, free, torch.tensor([1, 2, count // 3, 1]), totals[2:4])


@on_device
def test_the_edge_of_long_heads() -> None:
    """Longer than what one program searches; equal rows of several heads at the edge."""
    heads, count = 2, 20_000
    scores = draw(1, (heads, count), torch.float32).mul(300).round() / 300
    scores[1, : count // 2] = scores[0, : count // 2]
    pos = torch.arange(count).repeat(heads, 1)
    free = torch.rand((heads, count), generator=randoms(9)) < 0.8
    free[:, :4] = True
    wish = torch.tensor([count // 10, count // 3])
    chosen_alike(scores, pos, free, wish, [count // 5])
    scores[:] = -0.25  # the layer's best rows are the last ones of both heads
    chosen_alike(scores, pos, free, wish, [count // 5 + 1])


@on_device
@pytest.mark.parametrize("how", ["max", "avg"])
@pytest.mark.parametrize(("count", "kernel_size"), [(1, 7), (40, 3), (40, 1), (300, 7), (40, 17)])
def test_scores_are_pooled(how: str, count: int, kernel_size: int) -> None:
    scores, pos, _ = rows(3, count)
    scores = scores.masked_fill(scores.isinf(), 2.0)
    made = kernel("triton.selection")
    both = torch.stack((scores, scores.flip(1)))
    mass = draw(3, (3, 4, count), torch.float32).abs()
    early = count // 3
    pos[:, early:] = 2 * count + torch.arange(count - early)
    for first in (0, early, count):
        order = pos[:, :first].argsort(dim=1, stable=True)
        line = torch.cat((order, torch.arange(first, count).expand(3, -1)), 1)
        free = torch.zeros_like(line, dtype=torch.bool)
        free.scatter_(1, line[:, count // 4 : max(1, count - 2)], True)  # neighbours
        free[0] = False
        there = guarded(order), guarded(free), kernel_size, how
        for given in (scores, both):
            want = plain_torch.pool(given, order, free, kernel_size, how)
            close(made.pool(guarded(given), *there), want)
            named = line.expand(given.shape)  # without the order: all rows where they belong
            sorted_free, none = free.gather(1, line), order[:, :0]
            plain = given.gather(-1, named), none, sorted_free, kernel_size, how
            assert torch.equal(want.gather(-1, named), plain_torch.pool(*plain))
        for join in ("mean", "sum", "max"):
            wish = plain_torch.pool_mass(mass, 7, join, order, free, kernel_size, how)
            same(made.pool_mass(guarded(mass), 7, join, *there), wish)


@on_device
@pytest.mark.parametrize("count", ROWS)
def test_how_much_attention_stayed(count: int) -> None:
    _, pos, keep = rows(3, count)
    keep[0, 0], pos[:, 0] = True, 0
    mass = draw(4, (3, 2, count), torch.float32).abs()
    got = kernel("triton.selection").stayed(guarded(mass), guarded(keep), guarded(pos))
    close(got, plain_torch.stayed(mass, keep, pos))


@on_device
@pytest.mark.parametrize("seed", some_by_day(range(6), lambda seed: seed < 2))
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_numbers_are_shared(heads: int, seed: int) -> None:
    made = kernel("triton.selection")
    most = counts(seed + 10, heads, 30)
    for total in (0, 7 * heads + seed, 40 * heads):
        parts, some = 3, torch.tensor(total)
        wish = torch.multinomial(torch.ones(heads), parts * total + 1, True, generator=randoms(1))
        wish = torch.bincount(wish[1:], minlength=heads)
        same(
            made.share(guarded(wish), 1, 0, parts, guarded(most), guarded(some)),
            plain_torch.share(wish, 1, 0, parts, most, some),
        )
        for times, even in ((0, 1), (3, 2)):  # of wishes that sum to parts x total
            need = torch.multinomial(torch.ones(heads), total + 1, True, generator=randoms(1))
            need = torch.bincount(need[1:], minlength=heads)
            given = times, even, even * heads + times
            same(
                made.share(guarded(need), *given, guarded(most), guarded(some)),
                plain_torch.share(need, *given, most, some),
            )


@on_device
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("least", [0, 1, 2])
def test_the_richest_heads_give(seed: int, least: int) -> None:
    heads = 6
    free = counts(seed, heads, 5)
    given = torch.minimum(counts(seed + 20, heads, 4), free)
    sure = counts(seed + 40, heads, 1)
    want = plain_torch.ensure_least(given, sure, free, least)
    got = kernel("triton.selection").ensure_least(
        guarded(given), guarded(sure), guarded(free), least
    )
    same(got, want)
