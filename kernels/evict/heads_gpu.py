"""Decides how many rows each head keeps, and which, in Triton: one launch for each operation.

In torch each would be ten to forty launches on a few numbers, which took nine tenths of the time at
the end of a prompt of 8,192 tokens. There are few heads, so one program compares each with each
instead of sorting. Specification: `plain.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.evict.plain import Tables
from minikv.kernels.gpu import head_stride, lines, power

_MANY, _WARPS = 4096, 16  # rows of a round, and warps, of a program with all rows of a head
_LISTED = 1024  # rows of a round of `_survivors`


@triton.jit(
    do_not_specialize=["pos_head", "rows", "sinks", "young", "pinned"],
    do_not_specialize_on_alignment=["pos"],
)
def _divide(pos, stays, free, counts, pos_head, rows, sinks, young, pinned, BN: tl.constexpr):
    h = tl.program_id(0).to(tl.int64)
    heads = tl.num_programs(0)
    staying = tl.zeros((BN,), tl.int32)
    own = tl.zeros((BN,), tl.int32)
    rest = tl.zeros((BN,), tl.int32)
    for s in tl.range(0, rows, BN):
        j = s + tl.arange(0, BN)
        inside = j < rows
        at = tl.load(pos + h * pos_head + j, mask=inside, other=-1)
        live = at >= 0
        stay = ((at < sinks) | (at >= young) | (at < pinned)) & live
        go = live & (stay == 0)
        tl.store(stays + h * rows + j, stay, mask=inside)
        tl.store(free + h * rows + j, go, mask=inside)
        staying += stay.to(tl.int32)
        own += (stay & (at >= pinned)).to(tl.int32)
        rest += go.to(tl.int32)
    tl.store(counts + h, tl.sum(staying, 0))
    tl.store(counts + heads + h, tl.sum(own, 0))
    tl.store(counts + 2 * heads + h, tl.sum(rest, 0))


@triton.jit(
    do_not_specialize=["keep_head", "rows", "before"], do_not_specialize_on_alignment=["keep"]
)
def _survivors(keep, order, index, count, keep_head, rows, before, BN: tl.constexpr):
    h = tl.program_id(0).to(tl.int64)
    done = tl.zeros((), tl.int32)
    for s in tl.range(0, rows, BN):
        place = s + tl.arange(0, BN)
        early = place < before
        row = tl.load(order + h * before + place, mask=early, other=0)
        row = tl.where(early, row, place)
        inside = place < rows
        stays = (tl.load(keep + h * keep_head + row, mask=inside, other=0) != 0) & inside
        place = done + tl.cumsum(stays.to(tl.int32), 0) - 1
        tl.store(index + h * rows + place, row, mask=stays)
        done += tl.sum(stays.to(tl.int32), 0)
    tl.store(count + h, done)


@triton.jit
def _filled(used, ok, total):
    """`plain.fill` for the heads that are `ok`."""
    highest = tl.maximum(used[:, None], used[None, :])
    raised = ok & (tl.sum(tl.where(ok[None, :], highest, 0), 1) <= total)
    count = tl.sum(raised.to(tl.int64), 0)
    spare = total - tl.sum(tl.where(ok & (raised == 0), used, 0), 0)
    level = spare // tl.maximum(count, 1)
    low = ok & (used <= level)
    extra = low & (tl.cumsum(low.to(tl.int64), 0) <= spare - level * count)
    return tl.where(count > 0, tl.maximum(used, level) + extra.to(tl.int64), used)


@triton.jit(
    do_not_specialize=["heads", "times", "even", "parts"],
    do_not_specialize_on_alignment=["need", "most", "total"],
)
def _share(need, most, total, out, heads, times, even, parts, HP: tl.constexpr):
    i = tl.arange(0, HP)
    ok = i < heads
    all_ = tl.load(total)
    wish = tl.load(need + i, mask=ok, other=0) * times + all_ * even
    limit = tl.load(most + i, mask=ok, other=0)
    all_ = tl.minimum(all_, tl.sum(limit, 0))
    full = limit * parts
    raised = tl.minimum(full[None, :], wish[None, :] + (full - wish)[:, None])
    is_full = ok & (tl.sum(tl.where(ok[None, :], raised, 0), 1) <= all_ * parts)
    others = tl.sum((ok & (is_full == 0)).to(tl.int64), 0)
    lift = all_ * parts - tl.sum(tl.where(ok, tl.where(is_full, full, wish), 0), 0)
    unit = tl.maximum(others, 1) * parts
    exact = tl.where(is_full, limit * unit, wish * others + lift)
    counts = exact // unit
    key = (exact - counts * unit) * heads + heads - 1 - i
    better = ok[None, :] & (key[None, :] > key[:, None])
    more = tl.sum(better.to(tl.int64), 1) < all_ - tl.sum(tl.where(ok, counts, 0), 0)
    tl.store(out + i, counts + more.to(tl.int64), mask=ok)


@triton.jit(
    do_not_specialize=["heads", "least"], do_not_specialize_on_alignment=["counts", "sure", "free"]
)
def _ensure_least(counts, sure, free, out, heads, least, HP: tl.constexpr):
    i = tl.arange(0, HP)
    ok = i < heads
    mine = tl.load(counts + i, mask=ok, other=0)
    rich = mine + tl.load(sure + i, mask=ok, other=0)
    lack = tl.minimum(least - rich, tl.load(free + i, mask=ok, other=0) - mine)
    lack = tl.where(ok, tl.maximum(lack, 0), 0)
    given = tl.zeros((HP,), tl.int64)
    able = tl.sum(lack, 0)
    while able > 0:  # the head with the most rows gives one; of equal heads, the first
        left = tl.where(ok & (given < mine) & (rich - given > least), rich - given, -1)
        top = tl.max(left, 0)
        who = tl.min(tl.where(left == top, i, HP), 0)
        given += ((i == who) & (top >= 0)).to(tl.int64)
        able = tl.where(top < 0, 0, able - 1)
    got = tl.minimum(tl.maximum(tl.sum(given, 0) - tl.cumsum(lack, 0) + lack, 0), lack)
    tl.store(out + i, mine - given + got, mask=ok)


@triton.jit(
    do_not_specialize=["heads", "begin", "floor", "total", "spare", "owned"],
    do_not_specialize_on_alignment=["start", "length", "capacity", "cap", "free_slot"],
)
def _lay_out(
    count,
    start,
    length,
    capacity,
    cap,
    free_slot,
    heads,
    begin,
    floor,
    total,
    spare,
    owned,
    HP: tl.constexpr,
):
    i = tl.arange(0, HP)
    ok = i < heads
    held = tl.load(count + i, mask=ok, other=0)
    caps = tl.maximum(held, floor)
    if total >= 0:
        caps = _filled(held, ok, total)
    sizes = tl.where(ok, caps + spare, 0)
    if owned >= 0:
        sizes = tl.where(ok, _filled(sizes, ok, owned), 0)
    tl.store(start + i, begin + tl.cumsum(sizes, 0) - sizes, mask=ok)
    tl.store(length + i, held, mask=ok)
    tl.store(capacity + i, sizes, mask=ok)
    tl.store(cap + i, caps, mask=ok)
    tl.store(free_slot + i, tl.full((HP,), -1, tl.int64), mask=ok)


def divide(pos: Tensor, sinks: int, young: int, pinned: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `plain.divide`."""
    pos = lines(pos)
    heads, rows = pos.shape
    stays = torch.empty((heads, rows), dtype=torch.bool, device=pos.device)
    free = torch.empty_like(stays)
    counts = torch.empty((3, heads), dtype=torch.int64, device=pos.device)
    numbers = head_stride(pos), rows, sinks, young, pinned
    _divide[(heads,)](pos, stays, free, counts, *numbers, BN=_MANY, num_warps=_WARPS)
    return stays, free, counts


def survivors(keep: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """See `plain.survivors`."""
    keep, order = lines(keep), order.contiguous()
    heads, rows = keep.shape
    index = torch.empty((heads, rows), dtype=torch.int64, device=keep.device)
    count = torch.empty(heads, dtype=torch.int64, device=keep.device)
    strides = head_stride(keep), rows, order.shape[1]
    _survivors[(heads,)](keep, order, index, count, *strides, BN=_LISTED)
    return index, count


def share(need: Tensor, times: int, even: int, parts: int, most: Tensor, total: Tensor) -> Tensor:
    """See `plain.share`."""
    need, most = need.contiguous(), most.contiguous()
    out = torch.empty_like(need)
    _share[(1,)](need, most, total, out, len(need), times, even, parts, HP=power(len(need)))
    return out


def ensure_least(counts: Tensor, sure: Tensor, free: Tensor, least: int) -> Tensor:
    """See `plain.ensure_least`."""
    if least == 0:
        return counts
    counts, sure, free = (t.contiguous() for t in (counts, sure, free))
    out = torch.empty_like(counts)
    _ensure_least[(1,)](counts, sure, free, out, len(counts), least, HP=power(len(counts)))
    return out


def lay_out(
    count: Tensor, begin: int, tables: Tables, floor: int, total: int, spare: int, owned: int
) -> None:
    """See `plain.lay_out`."""
    numbers = len(count), begin, floor, total, spare, owned
    _lay_out[(1,)](count, *tables, *numbers, HP=power(len(count)))
