"""Chooses which rows stay, in Triton: finds the k-th largest order key without sorting.

This takes three launches: two count the keys by ten bits each, and the third lists the keys that
share the twenty bits of the k-th, usually a few. The last program to finish searches the list. For
a few rows one program searches them all. Specification: `plain.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.gpu import head_stride, lines, power

_ROWS = 1024  # of a head, in one program or one round of it
_FEW, _FEW_IN_ALL = 4096, 8192  # rows of a head and of a layer that one program searches alone
_SEARCHED, _SEARCHERS = 2048, 8  # rows of a round of that program, and its warps
_BINS = 1024  # values of the digits by which keys are counted
_LEAST = tl.constexpr(-(1 << 63))  # `plain.NOT_FREE`
_MOST = tl.constexpr((1 << 63) - 1)


@triton.jit(
    do_not_specialize=["scores_head", "pos_head", "free_head", "rows"],
    do_not_specialize_on_alignment=["scores", "pos", "free"],
)
def _order_key(scores, pos, free, out, scores_head, pos_head, free_head, rows, BN: tl.constexpr):
    h = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = j < rows
    bits = (tl.load(scores + h * scores_head + j, mask=inside, other=0.0) + 0.0).to(
        tl.int32, bitcast=True
    )
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    at = tl.load(pos + h * pos_head + j, mask=inside, other=0)
    ok = tl.load(free + h * free_head + j, mask=inside, other=0) != 0
    key = (bits << 32) | tl.maximum(at, 0)
    tl.store(out + h * rows + j, tl.where(ok, key, _LEAST), mask=inside)


@triton.jit
def _rank(counts):
    """int32: the rank of the wanted key, counted from 1. If there are fewer keys, the number does
    not matter."""
    return tl.minimum(tl.maximum(tl.load(counts), 1), 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _high(key):
    """int32: the first 20 bits of a key, in the order of keys, from 0 on."""
    return ((key >> 44) + (1 << 19)).to(tl.int32)


@triton.jit
def _digit(counts, k, BINS: tl.constexpr):
    """The digit of the k-th largest number, or -1 if there are fewer; and its rank among those with
    this digit. counts int32 [BINS]: how many numbers have each digit."""
    i = tl.arange(0, BINS)
    count = tl.load(counts + i)
    digit = tl.sum((tl.cumsum(count, 0, reverse=True) >= k).to(tl.int32), 0) - 1
    return digit, k - tl.sum(tl.where(i > digit, count, 0), 0)


@triton.jit
def _edge(keys, rows, k, BN: tl.constexpr, CACHE: tl.constexpr):
    """int64: the k-th largest of `rows` keys, or another number that is above exactly as many keys.
    If there are fewer than k free rows, the key of rows that are not free.

    The keys between `lo` and `hi` are divided into four at each pass. CACHE: how they are read."""
    low = tl.full((BN,), _MOST, tl.int64)
    high = tl.full((BN,), _LEAST, tl.int64)
    many = tl.zeros((BN,), tl.int32)
    for s in tl.range(0, rows, BN):
        j = s + tl.arange(0, BN)
        key = tl.load(keys + j, mask=j < rows, other=_LEAST, cache_modifier=CACHE)
        low = tl.minimum(low, tl.where(key > _LEAST, key, _MOST))
        high = tl.maximum(high, key)
        many += (key > _LEAST).to(tl.int32)
    lo = tl.min(low, 0)
    hi = tl.max(high, 0)
    have = tl.sum(many, 0)  # how many are at least `lo`: never fewer than k
    enough = have >= k
    while (have > k) & (lo < hi):
        step = tl.maximum((hi >> 2) - (lo >> 2), 1)  # their difference may need 65 bits
        begin = lo
        one = tl.zeros((BN,), tl.int32)
        two = tl.zeros((BN,), tl.int32)
        three = tl.zeros((BN,), tl.int32)
        for s in tl.range(0, rows, BN):
            j = s + tl.arange(0, BN)
            key = tl.load(keys + j, mask=j < rows, other=_LEAST, cache_modifier=CACHE)
            one += (key >= begin + step).to(tl.int32)
            two += (key >= begin + 2 * step).to(tl.int32)
            three += (key >= begin + 3 * step).to(tl.int32)
        # Two counts in one number, as each sum makes all threads wait for each other.
        both = tl.sum(one.to(tl.int64) | (two.to(tl.int64) << 32), 0)
        last = tl.sum(three, 0)
        for d in tl.static_range(3):
            if d == 2:
                count = last
            else:
                count = (both >> (32 * d)).to(tl.int32)
            start = begin + (d + 1) * step
            hi = tl.where(count < k, tl.minimum(hi, start - 1), hi)
            lo = tl.where(count >= k, start, lo)
            have = tl.where(count >= k, count, have)
    return tl.where(enough, lo, _LEAST)


@triton.jit
def _numbers(
    keys,
    whose,
    many,
    rows,
    edge,
    all_,
    more,
    have,
    HP: tl.constexpr,
    BN: tl.constexpr,
    LISTED: tl.constexpr,
):
    """int64 [HP]: how many of the layer's `all_` best rows each head holds. Of equal keys, those of
    the first heads count. LISTED: `whose` gives the head of each of the `many` keys; more int32
    [HP] counts the better keys that are not listed, have int32 [HP] all free rows of the head.
    Otherwise the keys are those of all heads, and nothing is counted yet."""
    tied = tl.zeros((HP,), tl.int32)
    for s in tl.range(0, many, BN):
        j = s + tl.arange(0, BN)
        inside = j < many
        if LISTED:
            key = tl.load(keys + j, mask=inside, other=_LEAST, cache_modifier=".cg")
            h = tl.load(whose + j, mask=inside, other=0, cache_modifier=".cg")
        else:
            key = tl.load(keys + j, mask=inside, other=_LEAST)
            h = j // rows
            have += tl.histogram(h, HP, mask=key > _LEAST)
        more += tl.histogram(h, HP, mask=inside & (key > edge))
        tied += tl.histogram(h, HP, mask=inside & (key == edge))
    one = (tied > 0).to(tl.int32)
    some = more + ((one > 0) & (tl.cumsum(one, 0) <= all_ - tl.sum(more, 0))).to(tl.int32)
    some = tl.where(all_ > 0, some, 0)
    return tl.where(all_ >= tl.sum(have, 0), have, some).to(tl.int64)


@triton.jit(
    do_not_specialize=["counts_head", "rows"], do_not_specialize_on_alignment=["key", "counts"]
)
def _tally(
    key,
    tallies,
    counts,
    counts_head,
    rows,
    EACH: tl.constexpr,
    LATER: tl.constexpr,
    BINS: tl.constexpr,
    BN: tl.constexpr,
):
    """Count keys by their first digit; LATER: by their second digit, if they have the first digit
    of the wanted key. EACH: for each head, not for all together."""
    h = tl.program_id(1).to(tl.int64)
    line = h * EACH
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    mine = tl.load(key + h * rows + j, mask=j < rows, other=_LEAST)
    ok = mine > _LEAST
    high = _high(mine)
    to = tallies + line * BINS
    if LATER:
        first, _ = _digit(to, _rank(counts + line * counts_head), BINS)
        ok = ok & (high // BINS == first)
        if EACH:
            to += tl.num_programs(1) * BINS
        else:
            to += BINS
        found = tl.histogram(high % BINS, BINS, mask=ok)
    else:
        found = tl.histogram(high // BINS, BINS, mask=ok)
    tl.atomic_add(to + tl.arange(0, BINS), found, mask=found > 0, sem="relaxed")


@triton.jit(
    do_not_specialize=["counts_head", "rows"], do_not_specialize_on_alignment=["key", "counts"]
)
def _settle(
    key,
    tallies,
    notes,
    listed,
    whose,
    counts,
    out,
    counts_head,
    rows,
    EACH: tl.constexpr,
    BINS: tl.constexpr,
    HP: tl.constexpr,
    BN: tl.constexpr,
):
    """List the keys that have both digits of the wanted key. The last program to finish finds it
    among them. EACH: it is the result int64 [H]; otherwise the result is that of `wanted`.

    notes int32, zeros: the length of each list, and how many programs have finished; without EACH
    also, for each head, how many better keys are not listed and how many rows are free."""
    h = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1)
    line = h * EACH
    lists = heads if EACH else 1
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    mine = tl.load(key + h * rows + j, mask=j < rows, other=_LEAST)
    first, left = _digit(tallies + line * BINS, _rank(counts + line * counts_head), BINS)
    second, left = _digit(tallies + (lists + line) * BINS, left, BINS)
    prefix = first * BINS + second
    high = _high(mine)
    ok = mine > _LEAST
    take = (ok & (high == prefix)).to(tl.int32)
    begin = tl.atomic_add(notes + line, tl.sum(take, 0), sem="relaxed")
    place = line * rows + begin + tl.cumsum(take, 0) - 1
    tl.store(listed + place, mine, mask=take > 0)
    ended = notes + lists
    sums = notes + 2 * lists
    if EACH == 0:
        tl.store(whose + place, tl.zeros((BN,), tl.int32) + tl.program_id(1), mask=take > 0)
        more = (ok & (high > prefix)).to(tl.int32)
        both = tl.sum(more | (ok.to(tl.int32) << 16), 0)  # one sum, fewer registers
        tl.atomic_add(sums + h, both & 0xFFFF, sem="relaxed")
        tl.atomic_add(sums + heads + h, both >> 16, sem="relaxed")
    # As in decode/gpu.py: the barrier orders the stores of all threads before the count, and the
    # atomic orders these before the reads of the last program.
    tl.debug_barrier()
    others = tl.atomic_add(ended + line, 1, sem="acq_rel", scope="gpu")
    if others == tl.num_programs(0) * (heads // lists) - 1:
        many = tl.load(notes + line, cache_modifier=".cg")
        edge = _edge(listed + line * rows, many, left, BN, ".cg")
        if EACH:
            tl.store(out + h, edge)
        else:
            i = tl.arange(0, HP)
            real = i < heads
            some = tl.load(sums + i, mask=real, other=0, cache_modifier=".cg")
            have = tl.load(sums + heads + i, mask=real, other=0, cache_modifier=".cg")
            all_ = tl.load(counts)
            result = _numbers(listed, whose, many, 1, edge, all_, some, have, HP, BN, True)
            tl.store(out + i, result, mask=real)


@triton.jit(
    do_not_specialize=["counts_head", "also_head", "rows"],
    do_not_specialize_on_alignment=["key", "counts", "also"],
)
def _chosen(
    key,
    edges,
    counts,
    also,
    out,
    counts_head,
    also_head,
    rows,
    ALSO: tl.constexpr,
    ALONE: tl.constexpr,
    BN: tl.constexpr,
):
    """ALONE: one program has the whole head, and finds the edge itself."""
    h = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + h * counts_head)
    begin = tl.program_id(0) * BN
    if ALONE:
        edge = _edge(key + h * rows, rows, _rank(counts + h * counts_head), BN, "")
        end = rows
    else:
        edge = tl.load(edges + h)
        end = begin + BN
    for s in tl.range(begin, end, BN):
        j = s + tl.arange(0, BN)
        inside = j < rows
        mine = tl.load(key + h * rows + j, mask=inside, other=_LEAST)
        mine = (mine > _LEAST) & (mine >= edge) & (count > 0)
        if ALSO:
            mine = mine | (tl.load(also + h * also_head + j, mask=inside, other=0) != 0)
        tl.store(out + h * rows + j, mine, mask=inside)


@triton.jit(do_not_specialize=["heads", "rows"], do_not_specialize_on_alignment=["key", "total"])
def _wanted(key, total, out, heads, rows, HP: tl.constexpr, BN: tl.constexpr):
    """For few rows: one program finds the edge of all heads and counts."""
    i = tl.arange(0, HP)
    many = heads * rows
    edge = _edge(key, many, _rank(total), BN, "")
    none = tl.zeros((HP,), tl.int32)
    all_ = tl.load(total)
    result = _numbers(key, key, many, rows, edge, all_, none, none, HP, BN, False)
    tl.store(out + i, result, mask=i < heads)


def order_key(scores: Tensor, pos: Tensor, free: Tensor) -> Tensor:
    """See `plain.order_key`."""
    scores, pos, free = lines(scores.to(torch.float32)), lines(pos), lines(free)
    heads, rows = scores.shape
    out = torch.empty((heads, rows), dtype=torch.int64, device=scores.device)
    given = scores, pos, free
    _order_key[_grid(rows, heads)](*given, out, *map(head_stride, given), rows, BN=_ROWS)
    return out


def best(key: Tensor, counts: Tensor, most: int, also: Tensor | None = None) -> Tensor:
    """See `plain.best`."""
    more = key if also is None else lines(also)
    heads, rows = key.shape
    alone = rows <= _FEW
    out = torch.empty((heads, rows), dtype=torch.bool, device=key.device)
    edges = counts if alone else _settled(key, counts, each=True)
    given = key, edges, counts, more, out, head_stride(counts), head_stride(more), rows
    grid, many, warps = _grid(rows, heads), _ROWS, 4
    if alone:
        grid, many, warps = (1, heads), _SEARCHED, _SEARCHERS
    _chosen[grid](*given, ALSO=also is not None, ALONE=alone, BN=many, num_warps=warps)
    return out


def wanted(key: Tensor, total: Tensor, most: int) -> Tensor:
    """See `plain.wanted`."""
    heads, rows = key.shape
    if key.numel() > _FEW_IN_ALL:
        return _settled(key, total, each=False)
    out = torch.empty(heads, dtype=torch.int64, device=key.device)
    sizes = {"HP": _heads(heads), "BN": _SEARCHED}
    _wanted[(1,)](key, total, out, heads, rows, **sizes, num_warps=_SEARCHERS)
    return out


def _settled(key: Tensor, counts: Tensor, *, each: bool) -> Tensor:
    """int64 [H]. each: the order key of rank counts[h] in each head, or another number that selects
    as many rows. Otherwise `plain.wanted`, with counts int64 [] as its total."""
    heads, rows = key.shape
    lists = heads if each else 1
    tallied, noted = 2 * lists * _BINS, 2 * lists + 2 * heads
    zeros = torch.zeros(tallied + noted, dtype=torch.int32, device=key.device)
    tallies, notes = zeros[:tallied], zeros[tallied:]
    out = torch.empty(heads, dtype=torch.int64, device=key.device)
    listed = torch.empty_like(key)
    whose = notes if each else torch.empty_like(key, dtype=torch.int32)
    stride = head_stride(counts) if each else 0
    grid = _grid(rows, heads)
    for later in (False, True):
        given = key, tallies, counts, stride, rows
        _tally[grid](*given, EACH=int(each), LATER=later, BINS=_BINS, BN=_ROWS)
    sizes = {"EACH": int(each), "BINS": _BINS, "HP": _heads(heads), "BN": _ROWS}
    _settle[grid](key, tallies, notes, listed, whose, counts, out, stride, rows, **sizes)
    return out


def _grid(rows: int, lines: int) -> tuple[int, int]:
    return max(1, -(-rows // _ROWS)), lines


def _heads(heads: int) -> int:
    """The number of heads for which a kernel counts rows, at least the threads of a warp."""
    return max(32, power(heads))
