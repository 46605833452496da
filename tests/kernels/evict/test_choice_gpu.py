"""Which rows stay, how many each head keeps, and moving them, in Triton, as in torch, to the bit,
in guarded memory."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor
from triton_device import INTERPRETED, draw, guarded, kernel, on_device, randoms

from minikv.kernels.evict import plain as plain_torch

pytest.importorskip("triton", reason="no Triton on this system")


def places(heads: int, count: int) -> Tensor:
    """Positions in any order, some of which are no rows."""
    drawn = [torch.randperm(2 * count, generator=randoms(h))[:count] for h in range(heads)]
    pos = torch.stack(drawn)
    pos[:, 2::5] = -1
    return pos


def rows(heads: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores with many ties, `places`, and free rows."""
    scores = draw(1, (heads, count), torch.float32).mul(4).round() / 4
    scores[:, ::7] = 0.0
    scores[:, 3::7] = -0.0
    scores[:, 5::11] = math.inf
    scores[:, 6::11] = -math.inf
    pos = places(heads, count)
    free = (torch.rand((heads, count), generator=randoms(9)) < 0.7) & (pos >= 0)
    free[0] = False
    return scores, pos, free


def same(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    assert torch.equal(got.cpu(), want)


def chosen_alike(
    scores: Tensor, pos: Tensor, free: Tensor, wish: Tensor, totals: list[int], whole: bool = False
) -> None:
    """By `best` and by `wanted`, as in torch. whole: also by `best` with further rows, and with one
    count for all heads."""
    made, key = kernel("evict.choose_gpu"), plain_torch.order_key(scores, pos, free)
    there = made.order_key(guarded(scores), guarded(pos), guarded(free))
    same(there, key)
    there, most = guarded(key), max(1, int(wish.max()))
    for also in (None, pos % 3 == 0)[: 1 + whole]:
        more = None if also is None else guarded(also)
        want = plain_torch.best(key, wish, most, also)
        same(made.best(there, guarded(wish), most, more), want)
    if whole:
        alike = wish[1:2].expand(len(wish))
        stride0 = guarded(wish[1:2]).expand(len(wish))
        same(made.best(there, stride0, most), plain_torch.best(key, alike, most))
    for total in totals:
        some, limit = torch.tensor(total), max(1, total)
        want = plain_torch.wanted(key, some, limit)
        same(made.wanted(there, guarded(some), limit), want)


@on_device
@pytest.mark.parametrize(("count", "few"), [(1, False), (40, True), (2100, True), (2100, False)])
def test_the_edge_is_found(count: int, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of scores with and without ties, of equal scores alone, with counts from none to more than
    there are. few: one program searches alone."""
    made = kernel("evict.choose_gpu")
    for name in ("_FEW", "_FEW_IN_ALL"):
        monkeypatch.setattr(made, name, 1 << 20 if few else 0)
    heads = 4
    tied, pos, free = rows(heads, count)
    free[1] = pos[1] >= 0  # many of one head, and none of the first
    have = int(free.sum())
    wish = torch.tensor([count // 2, count // 2, 0, count + 5])
    ends, between = [0, 1, have, have + 7], [have // 3, have - 1]
    chosen_alike(tied, pos, free, wish, between if count > 40 else ends + between, whole=True)
    chosen_alike(tied, pos, free & False, wish, ends[:1])
    if INTERPRETED and count > 40:
        return  # the rest is for fewer rows, or a GPU
    chosen_alike(torch.zeros_like(tied), pos, free, wish, between[:1])
    plain = draw(8, tied.shape, torch.float32)
    plain[:, 1::3] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # a GPU's NaN
    far = torch.where(pos < 0, pos, pos + 2**31 - 3 * count)  # the last positions of an int32
    chosen_alike(plain, far, free, torch.tensor([1, 2, count // 3, 1]), between[1:])


@on_device
def test_the_edge_of_long_heads() -> None:
    """Longer than what one program searches; equal rows of several heads at the edge."""
    heads, count = 2, 5_000 if INTERPRETED else 20_000
    scores = draw(1, (heads, count), torch.float32).mul(300).round() / 300
    scores[1, : count // 2] = scores[0, : count // 2]
    pos = torch.arange(count).repeat(heads, 1)
    free = torch.rand((heads, count), generator=randoms(9)) < 0.8
    free[:, :4] = True
    wish = torch.tensor([count // 10, count // 3])
    chosen_alike(scores, pos, free, wish, [count // 5], whole=not INTERPRETED)
    scores[:] = -0.25  # the layer's best rows are the last ones of both heads
    chosen_alike(scores, pos, free, wish, [count // 5 + 1])


@on_device
@pytest.mark.parametrize(("heads", "rows", "early"), [(1, 1, 1), (3, 70, 0), (5, 4100, 900)])
def test_rows_of_each_head(heads: int, rows: int, early: int) -> None:
    made = kernel("evict.heads_gpu")
    pos = places(heads, rows)
    for sinks, young, pinned in ((0, 2 * rows, 0), (4, rows, 0), (2, rows, rows // 2)):
        want = plain_torch.divide(pos, sinks, young, pinned)
        for got, one in zip(made.divide(guarded(pos), sinks, young, pinned), want, strict=True):
            same(got, one)
    keep = torch.rand((heads, rows), generator=randoms(9)) < 0.6
    keep[0], keep[-1] = True, heads == 1
    order = pos[:, :early].argsort(dim=1, stable=True)
    index, count = made.survivors(guarded(keep), guarded(order))
    want_index, want_count = plain_torch.survivors(keep, order)
    same(count, want_count)
    for h, n in enumerate(want_count.tolist()):
        assert torch.equal(index[h, :n].cpu(), want_index[h, :n])


@on_device
@pytest.mark.parametrize("seed", range(12))
def test_counts_of_heads(seed: int) -> None:
    """Shares with and without room for them, least counts that heads can and cannot reach, and
    segments whose caps and sizes are raised or not."""
    made, source = kernel("evict.heads_gpu"), randoms(seed)
    heads = (1, 2, 8, 33)[seed % 4]

    def numbers(most: int) -> Tensor:
        return torch.randint(most, (heads,), generator=source)

    need, most, parts = numbers(40), numbers(60), 5 * heads
    total = need.sum()
    for times, even in ((4 * heads, 1), (parts, 0), (0, 5)):
        given = need, times, even, parts, most, total
        there = guarded(need), times, even, parts, guarded(most), guarded(total)
        same(made.share(*there), plain_torch.share(*given))
    counts, sure = numbers(12), numbers(3)
    free = counts + numbers(9)
    for least in (0, 1, 7, 40):
        want = plain_torch.ensure_least(counts, sure, free, least)
        same(made.ensure_least(*map(guarded, (counts, sure, free)), least), want)
    more = int(counts.sum()) + 20
    for room in ((0, -1, 0, -1), (9, -1, 2, -1), (0, more, 1, -1), (0, 0, 3, 900)):
        tables = [torch.full((heads,), 99) for _ in range(5)]
        there = [guarded(t) for t in tables]
        plain_torch.lay_out(counts, 40, tuple(tables), *room)
        made.lay_out(guarded(counts), 40, tuple(there), *room)
        for got, want in zip(there, tables, strict=True):
            same(got, want)


@on_device
@pytest.mark.parametrize("size", [80, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("before", [0, 37])
def test_survivors_move_into_segments(size: int, dtype: torch.dtype, before: int) -> None:
    """Every row to its place; memory between the segments does not change."""
    heads, tokens = 4, 63
    fresh = draw(1, (heads, tokens, size), dtype), draw(2, (heads, tokens, size), dtype)
    old = draw(3, (heads * before + 2, size), dtype), draw(4, (heads * before + 2, size), dtype)
    at = torch.randperm(heads * before + 2, generator=randoms(5))[: heads * before]
    at = at.view(heads, before)
    keep = torch.rand((heads, before + tokens), generator=randoms(6)) < 0.6
    keep[1], keep[2] = False, True
    new, shuffled = before + torch.arange(tokens), partial(torch.randperm, before)
    pos = torch.stack([torch.cat((shuffled(generator=randoms(h)), new)) for h in range(heads)])
    order = pos[:, :before].argsort(1)
    index, count = plain_torch.survivors(keep, order)
    start = torch.cumsum(count + 2, 0) - count
    total = int(start[-1] + count[-1]) + 3
    into = [guarded(torch.full((total, size), 7.0, dtype=dtype)) for _ in range(2)]
    places = guarded(torch.full((total,), 7, dtype=torch.int32))
    column = guarded(torch.full((total,), 7, dtype=torch.int32))
    scores = draw(9, tuple(pos.shape), torch.float32)
    score = guarded(torch.full((total,), 7.0))
    want = [t.clone().cpu() for t in (*into, places, column, score)]
    lists = [guarded(t) for t in (index, count, start)]
    source = None if not before else (guarded(old[0]), guarded(old[1]), guarded(at))
    gather = kernel("evict.gather_gpu")
    staged = guarded(fresh[0]), guarded(fresh[1])
    most = before + tokens
    gather.gather_rows(*lists, staged, source, tuple(into), (guarded(pos), places), most)
    gather.gather_columns(*lists, [guarded(pos), guarded(scores)], [column, score], most)
    earlier = (*old, at) if before else None
    chosen = index, count, start
    plain_torch.gather_rows(*chosen, fresh, earlier, (want[0], want[1]), (pos, want[2]), 100)
    plain_torch.gather_columns(*chosen, [pos, scores], want[3:], 100)
    assert torch.equal(want[2], want[3])
    for got, expected in zip((*into, places, column, score), want, strict=True):
        assert torch.equal(got.cpu(), expected)
