"""The end of a decode step, in Triton: update the statistics and choose the victims of all heads in
one launch.

A program has one KV head of one layer and reads its rows in tiles, in as few passes as possible. It
makes one integer key of each row: the score in the upper bits, the position in the lower ones. The
row with the lowest key is the victim: the lowest score, and of equal scores the oldest row. H2O
narrows the choice to rows older than the n newest. Their limit is guessed and checked by counting,
which nearly always works; otherwise it is found by bisection on its bits. RoCo narrows it to the n
smallest variances, whose limit `nth` finds. Nothing is sorted. Specification: `decode/plain.py` for
`lowest`, for the rest the file of each policy in minikv/policies.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.decode.plain import Rows

NONE = tl.constexpr((1 << 63) - 1)  # a key that no row has
_LAST = tl.constexpr((1 << 31) - 1)
NO_ORDER = _LAST  # of a row that may not leave; no score has it
_SCALARS = ["width", "sinks", "recent", "pinned"]
_BLOCK, _WARPS = 1024, 8


@triton.jit
def _mean_prob(logits, lse, head, width, j, ok, G: tl.constexpr):
    """The probabilities of rows j of a head, averaged over its G queries."""
    p = tl.zeros(j.shape, tl.float32)
    for g in tl.static_range(G):
        at = head * G + g
        x = tl.load(logits + at * width + j, mask=ok, other=-float("inf"))
        p += tl.exp(x - tl.load(lse + at))
    return tl.div_rn(p, G * 1.0)


@triton.jit
def ordered(score):
    """int32, larger for a larger score; a NaN comes after all numbers, and may leave too."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)  # -0 is 0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # the bits of negative floats have the reverse order
    return tl.where(score == score, bits, NO_ORDER - 1)


@triton.jit
def _key(score, at):
    """An int64 key, ordered by score, then by position."""
    return (ordered(score).to(tl.int64) << 32) | at.to(tl.int64)


@triton.jit
def lower(best, row, key, j, evictable):
    """In each lane, the lower of the lowest key so far and the key of a row, if it may leave."""
    lower = evictable & (key < best)
    return tl.where(lower, key, best), tl.where(lower, j, row)


@triton.jit
def lowest_of(best, row):
    """The lowest key of all lanes, and its row; row 0 if no row may leave."""
    least = tl.min(best, 0)
    found = tl.min(tl.where(best == least, row, _LAST), 0)
    return least, tl.where(least == NONE, 0, found)


@triton.jit
def may_leave(at, unpinned, newest, sinks, recent, strict):
    """Which rows are evictable: see `Rows`. Not `strict`: the rows to use if none is evictable."""
    return unpinned & tl.where(strict, (at >= sinks) & (at <= newest - recent), at < newest)


@triton.jit(do_not_specialize=["width"])
def _lowest(scores, pos, start, over, free_slot, width, BN: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    if tl.load(over + head):
        best = tl.full((BN,), NONE, tl.int64)
        row = tl.zeros((BN,), tl.int32)
        for s in tl.range(0, width, BN):
            j = s + tl.arange(0, BN)
            ok = j < width
            score = tl.load(scores + head * width + j, mask=ok, other=float("inf"))
            at = tl.load(pos + head * width + j, mask=ok, other=0)
            best, row = lower(best, row, _key(score, at), j, score < float("inf"))
        tl.store(free_slot + head, tl.load(start + head) + lowest_of(best, row)[1])


@triton.jit(do_not_specialize=_SCALARS)
def _h2o(
    logits,
    lse,
    start,
    length,
    cap,
    pos,
    newest,
    free_slot,
    sums,
    newest_rows,
    width,
    sinks,
    recent,
    pinned,
    G: tl.constexpr,
    BN: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    count = tl.load(length + head).to(tl.int32)
    begin = tl.load(start + head)
    now = tl.load(newest)
    wanted = tl.load(newest_rows + head)
    guess = now - wanted + 1  # if the head has the newest `wanted` positions
    n = tl.arange(0, BN)
    best = tl.full((BN,), NONE, tl.int64)
    row = tl.zeros((BN,), tl.int32)
    seen = tl.zeros((BN,), tl.int32)
    late = tl.zeros((BN,), tl.int32)
    some = tl.zeros((BN,), tl.int32)
    for s in tl.range(0, count, BN):
        j = s + n
        ok = j < count
        where = begin + j
        total = tl.load(sums + where, mask=ok, other=0.0)
        total += _mean_prob(logits, lse, head, width, j, ok, G)
        tl.store(sums + where, total, mask=ok)
        at = tl.load(pos + where, mask=ok, other=-1)
        unpinned = ok & (at >= pinned)
        evictable = may_leave(at, unpinned, now, sinks, recent, True)
        best, row = lower(best, row, _key(total, at), j, evictable & (at < guess))
        seen += unpinned.to(tl.int32)
        late += (unpinned & (at >= guess)).to(tl.int32)
        some += evictable.to(tl.int32)
    victim = tl.full((), -1, tl.int64)
    if count > tl.load(cap + head):
        tl.debug_barrier()  # values stored by other threads are read below
        shown_rows = tl.sum(seen, 0)
        newer = tl.maximum(tl.minimum(wanted, shown_rows - 1), 1)
        least, found = lowest_of(best, row)
        if (least == NONE) | (newer != wanted) | (tl.sum(late, 0) != newer):
            strict = tl.sum(some, 0) > 0
            lo = tl.full((), -1, tl.int64)  # `newer` rows or more are this late
            hi = now + 1  # fewer are
            while lo + 1 < hi:
                middle = (lo + hi) // 2
                late = tl.zeros((BN,), tl.int32)
                for s in tl.range(0, count, BN):
                    j = s + n
                    at = tl.load(pos + begin + j, mask=j < count, other=-1)
                    late += ((at >= pinned) & (at >= middle)).to(tl.int32)
                enough = tl.sum(late, 0) >= newer
                lo = tl.where(enough, middle, lo)
                hi = tl.where(enough, hi, middle)
            best = tl.full((BN,), NONE, tl.int64)
            row = tl.zeros((BN,), tl.int32)
            rest = best
            other = row
            for s in tl.range(0, count, BN):
                j = s + n
                ok = j < count
                at = tl.load(pos + begin + j, mask=ok, other=-1)
                evictable = may_leave(at, ok & (at >= pinned), now, sinks, recent, strict)
                key = _key(tl.load(sums + begin + j, mask=ok, other=0.0), at)
                best, row = lower(best, row, key, j, evictable & (at < lo))
                rest, other = lower(rest, other, key, j, evictable)
            least, found = lowest_of(best, row)
            if least == NONE:
                least, found = lowest_of(rest, other)
        victim = begin + found
    tl.store(free_slot + head, victim)


@triton.jit(do_not_specialize=_SCALARS)
def _roco(
    logits,
    lse,
    start,
    length,
    cap,
    pos,
    newest,
    free_slot,
    sums,
    squares,
    counted,
    steady_rows,
    width,
    sinks,
    recent,
    pinned,
    G: tl.constexpr,
    BN: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    count = tl.load(length + head).to(tl.int32)
    begin = tl.load(start + head)
    now = tl.load(newest)
    over = count > tl.load(cap + head)
    n = tl.arange(0, BN)
    some = tl.zeros((BN,), tl.int32)
    if over:
        for s in tl.range(0, count, BN):
            at = tl.load(pos + begin + s + n, mask=s + n < count, other=-1)
            some += may_leave(at, at >= pinned, now, sinks, recent, True).to(tl.int32)
    strict = tl.sum(some, 0) > 0
    orders = logits + head * G * width  # where the logits of the head's first query were
    orders = orders.to(tl.pointer_type(tl.int32))
    some = tl.zeros((BN,), tl.int32)
    for s in tl.range(0, count, BN):
        j = s + n
        ok = j < count
        where = begin + j
        p = _mean_prob(logits, lse, head, width, j, ok, G)
        total = tl.load(sums + where, mask=ok, other=0.0) + p
        power = tl.load(squares + where, mask=ok, other=0.0) + p * p
        seen = tl.load(counted + where, mask=ok, other=0.0) + 1.0
        tl.store(sums + where, total, mask=ok)
        tl.store(squares + where, power, mask=ok)
        tl.store(counted + where, seen, mask=ok)
        seen = tl.maximum(seen, 1.0)
        mean = tl.div_rn(total, seen)
        variance = tl.maximum(tl.div_rn(power, seen) - mean * mean, 0.0)  # rounded as torch rounds
        at = tl.load(pos + where, mask=ok, other=-1)
        evictable = may_leave(at, ok & (at >= pinned), now, sinks, recent, strict)
        tl.store(orders + j, tl.where(evictable, ordered(variance), NO_ORDER), mask=ok)
        some += evictable.to(tl.int32)
    victim = tl.full((), -1, tl.int64)
    if over:
        tl.debug_barrier()  # values stored by other threads are read below
        few = tl.maximum(tl.minimum(tl.load(steady_rows + head), tl.sum(some, 0)), 1)
        limit = nth(orders, count, few - 1, BN)[0]
        best = tl.full((BN,), NONE, tl.int64)
        row = tl.zeros((BN,), tl.int32)
        for s in tl.range(0, count, BN):
            j = s + n
            ok = j < count
            order = tl.load(orders + j, mask=ok, other=NO_ORDER)
            steady = (order <= limit) & (order < NO_ORDER)
            seen = tl.load(counted + begin + j, mask=ok, other=0.0)
            mean = tl.div_rn(tl.load(sums + begin + j, mask=ok, other=0.0), tl.maximum(seen, 1.0))
            at = tl.load(pos + begin + j, mask=ok, other=-1)
            best, row = lower(best, row, _key(mean, at), j, steady)
        victim = begin + lowest_of(best, row)[1]
    tl.store(free_slot + head, victim)


@triton.jit
def popcount(x):
    """The number of set bits of 32-bit numbers. Triton's interpreter has no operation for it."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return (x * 0x01010101) >> 24


def lowest(
    scores: Tensor, pos: Tensor, start: Tensor, over: Tensor, free_slot: Tensor, block: int = _BLOCK
) -> None:
    """See `decode.plain.lowest`. `block`: rows that a program reads at once."""
    given = scores.contiguous(), pos.contiguous(), start, over, free_slot
    assert all(t.is_contiguous() for t in given)
    assert scores.shape == pos.shape, "there is a score for every row"
    _lowest[(len(scores),)](*given, scores.shape[1], BN=block, num_warps=_WARPS)


def _step(
    kernel: Any,
    logits: Tensor,
    lse: Tensor,
    rows: Rows,
    free_slot: Tensor,
    columns: Sequence[Tensor],
    quota: Tensor,
    *,
    block: int = _BLOCK,
) -> None:
    """See `plain.evict`. `block`: rows that a program reads at once. RoCo overwrites the logits of
    the first query of each group with the order of the variances."""
    tables = rows.start, rows.length, rows.cap, rows.pos, rows.newest
    args = logits, lse, *tables, free_slot, *columns, quota
    assert all(t.is_contiguous() for t in args)
    assert logits.shape[-1] < MOST_ROWS.value
    numbers = logits.shape[-1], rows.sinks, rows.recent, rows.pinned
    how = {} if kernel is _h2o else {"enable_fp_fusion": False}  # variances round as in torch
    kernel[(free_slot.numel(),)](
        *args, *numbers, G=logits.shape[2], BN=block, num_warps=_WARPS, **how
    )


_BITS = tl.constexpr(21)  # of a number of rows, so that an int64 holds three
MOST_ROWS = tl.constexpr(1 << 21)


@triton.jit
def nth(orders, rows, rank, BN: tl.constexpr):
    """int32: the order of rank `rank`, counted from 0, among `rows` orders int32 (fewer than
    MOST_ROWS); `NO_ORDER` if fewer are below it. Also how many orders are lower."""
    found = tl.full((), -(1 << 31), tl.int32)
    below = tl.full((), 0, tl.int64)
    for i in tl.range(0, 16):
        step = tl.full((), 1, tl.int32) << (30 - 2 * i)
        one = tl.zeros((BN,), tl.int32)
        two = tl.zeros((BN,), tl.int32)
        three = tl.zeros((BN,), tl.int32)
        for s in tl.range(0, rows, BN):
            j = s + tl.arange(0, BN)
            order = tl.load(orders + j, mask=j < rows, other=NO_ORDER)
            one += (order < found + step).to(tl.int32)
            two += (order < found + 2 * step).to(tl.int32)
            three += (order < found + 3 * step).to(tl.int32)
        # The three counts in one number, because each sum makes all threads wait for each other.
        each = one.to(tl.int64) | (two.to(tl.int64) << _BITS)
        each |= three.to(tl.int64) << (2 * _BITS)
        counts = tl.sum(each, 0)
        digit = tl.full((), 0, tl.int32)
        for d in tl.static_range(3):
            count = (counts >> (_BITS * d)) & (MOST_ROWS - 1)
            below = tl.where(count <= rank, count, below)
            digit += (count <= rank).to(tl.int32)
        found += digit * step
    return found, below


evict = {"h2o": partial(_step, _h2o), "roco": partial(_step, _roco)}
