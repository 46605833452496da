"""The arithmetic of choosing rows, in Triton. Each operation is one launch, or a few.

There are few heads, so for numbers per head one program compares each with each instead of sorting.
Specification: `torch/selection.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.triton.tiles import head_stride, lines, power, typed
from minikv.kernels.triton.variants import Variant

_ROWS = 1024  # of a head, in one program or one round of it


# -- rows -------------------------------------------------------------------------------------


@triton.jit(
    do_not_specialize=["pos_head", "rows", "sinks", "young", "pinned"],
    do_not_specialize_on_alignment=["pos"],
)
def _divide(pos, stays, free, counts, pos_head, rows, sinks, young, pinned, BN: tl.constexpr):
    h = tl.program_id(0).to(tl.int64)
    heads = tl.num_programs(0)
    staying = tl.zeros((BN,), tl.int64)
    own = tl.zeros((BN,), tl.int64)
    rest = tl.zeros((BN,), tl.int64)
    for s in tl.range(0, rows, BN):
        j = s + tl.arange(0, BN)
        inside = j < rows
        at = tl.load(pos + h * pos_head + j, mask=inside, other=-1)
        live = at >= 0
        stay = ((at < sinks) | (at >= young) | (at < pinned)) & live
        go = live & (stay == 0)
        tl.store(stays + h * rows + j, stay, mask=inside)
        tl.store(free + h * rows + j, go, mask=inside)
        staying += stay.to(tl.int64)
        own += (stay & (at >= pinned)).to(tl.int64)
        rest += go.to(tl.int64)
    tl.store(counts + h, tl.sum(staying, 0))
    tl.store(counts + heads + h, tl.sum(own, 0))
    tl.store(counts + 2 * heads + h, tl.sum(rest, 0))


@triton.jit(
    do_not_specialize=["scores_head", "pos_head", "free_head", "rows"],
    do_not_specialize_on_alignment=["scores", "pos", "free"],
)
def _order_key(
    scores, pos, free, out, scores_head, pos_head, free_head, rows, LEAST, BN: tl.constexpr
):
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
    tl.store(out + h * rows + j, tl.where(ok, key, LEAST), mask=inside)


@triton.jit(
    do_not_specialize=["free_head", "counts_head", "also_head", "rows", "most"],
    do_not_specialize_on_alignment=["free", "counts", "also"],
)
def _chosen(
    key,
    free,
    found,
    counts,
    also,
    out,
    free_head,
    counts_head,
    also_head,
    rows,
    most,
    ALSO: tl.constexpr,
    BN: tl.constexpr,
):
    h = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = j < rows
    count = tl.minimum(tl.load(counts + h * counts_head), rows)
    edge = tl.load(found + h * most + tl.maximum(count - 1, 0))
    ok = tl.load(free + h * free_head + j, mask=inside, other=0) != 0
    mine = ok & (tl.load(key + h * rows + j, mask=inside, other=0) >= edge) & (count > 0)
    if ALSO:
        mine = mine | (tl.load(also + h * also_head + j, mask=inside, other=0) != 0)
    tl.store(out + h * rows + j, mine, mask=inside)


@triton.jit(
    do_not_specialize=["free_head", "rows", "most"],
    do_not_specialize_on_alignment=["free", "total"],
)
def _above(key, free, found, total, sums, free_head, rows, most, BN: tl.constexpr):
    h = tl.program_id(0).to(tl.int64)
    heads = tl.num_programs(0)
    last = tl.minimum(tl.maximum(tl.load(total) - 1, 0), most - 1)
    edge = tl.load(found + last)
    more = tl.zeros((BN,), tl.int64)
    tied = tl.zeros((BN,), tl.int64)
    have = tl.zeros((BN,), tl.int64)
    for s in tl.range(0, rows, BN):
        j = s + tl.arange(0, BN)
        inside = j < rows
        mine = tl.load(key + h * rows + j, mask=inside, other=0)
        ok = tl.load(free + h * free_head + j, mask=inside, other=0) != 0
        more += ((mine > edge) & inside).to(tl.int64)
        tied += ((mine == edge) & ok).to(tl.int64)
        have += ok.to(tl.int64)
    tl.store(sums + h, tl.sum(more, 0))
    tl.store(sums + heads + h, tl.sum(tied, 0))
    tl.store(sums + 2 * heads + h, tl.sum(have, 0))


@triton.jit(do_not_specialize=["heads"], do_not_specialize_on_alignment=["total"])
def _wanted(sums, total, out, heads, HP: tl.constexpr):
    i = tl.arange(0, HP)
    ok = i < heads
    more = tl.load(sums + i, mask=ok, other=0)
    tied = (tl.load(sums + heads + i, mask=ok, other=0) > 0).to(tl.int64)
    have = tl.load(sums + 2 * heads + i, mask=ok, other=0)
    all_ = tl.load(total)
    some = more + ((tied > 0) & (tl.cumsum(tied, 0) <= all_ - tl.sum(more, 0))).to(tl.int64)
    some = tl.where(all_ > 0, some, 0)
    tl.store(out + i, tl.where(all_ >= tl.sum(have, 0), have, some), mask=ok)


@triton.jit
def _joined(scores, row, ok, scores_group, group, queries, JOIN: tl.constexpr):
    """The scores of some rows of one head. JOIN 0: as they are. Else the numbers of the group are
    divided by `queries`, then joined: by the mean (1), the sum (2) or the maximum (3)."""
    if JOIN == 0:
        found = tl.load(scores + row, mask=ok, other=0.0)
    else:
        found = tl.zeros(row.shape, tl.float32)
        for g in tl.range(0, group):
            value = tl.load(scores + g * scores_group + row, mask=ok, other=0.0)
            value = tl.div_rn(value, tl.full(row.shape, 1.0, tl.float32) * queries)
            if JOIN == 3:
                found = tl.where(g == 0, value, tl.maximum(found, value))
            else:
                found += value
        if JOIN == 1:
            found = tl.div_rn(found, tl.full(row.shape, 1.0, tl.float32) * group)
    return found


@triton.jit(
    do_not_specialize=[
        "scores_line",
        "scores_group",
        "free_head",
        "heads",
        "rows",
        "early",
        "group",
        "queries",
        "kernel",
    ],
    do_not_specialize_on_alignment=["scores", "free"],
)
def _pool(
    scores,
    order,
    free,
    out,
    scores_line,
    scores_group,
    free_head,
    heads,
    rows,
    early,
    group,
    queries,
    kernel,
    MAX: tl.constexpr,
    JOIN: tl.constexpr,
    BN: tl.constexpr,
):
    line = tl.program_id(1).to(tl.int64)
    h = line % heads
    place = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = place < rows
    blank = -float("inf") if MAX else 0.0
    found = tl.full((BN,), blank, tl.float32)
    for i in tl.range(0, kernel):
        p = place - kernel // 2 + i
        there = (p >= 0) & (p < rows)
        row = tl.load(order + h * early + p, mask=there & (p < early), other=0)
        row = tl.where(p < early, row, p)
        ok = there & (tl.load(free + h * free_head + row, mask=there, other=0) != 0)
        value = _joined(scores + line * scores_line, row, ok, scores_group, group, queries, JOIN)
        value = tl.where(ok, value, blank)
        found = tl.maximum(found, value) if MAX else found + value
    if not MAX:
        found = tl.div_rn(found, tl.full((BN,), 1.0, tl.float32) * kernel)
    row = tl.load(order + h * early + place, mask=place < early, other=0)
    row = tl.where(place < early, row, place)
    ok = tl.load(free + h * free_head + row, mask=inside, other=0) != 0
    tl.store(out + line * rows + row, tl.where(ok, found, -float("inf")), mask=inside)


@triton.jit(
    do_not_specialize=["mass_head", "mass_group", "keep_head", "pos_head", "group", "rows"],
    do_not_specialize_on_alignment=["mass", "keep", "pos"],
)
def _stayed(
    mass, keep, pos, out, mass_head, mass_group, keep_head, pos_head, group, rows, BN: tl.constexpr
):
    h = tl.program_id(0).to(tl.int64)
    stays = tl.zeros((BN,), tl.float32)
    whole = tl.zeros((BN,), tl.float32)
    for s in tl.range(0, rows, BN):
        j = s + tl.arange(0, BN)
        inside = j < rows
        live = tl.load(pos + h * pos_head + j, mask=inside, other=-1) >= 0
        kept = tl.load(keep + h * keep_head + j, mask=inside, other=0) != 0
        for g in tl.range(0, group):
            value = tl.load(mass + h * mass_head + g * mass_group + j, mask=live, other=0.0)
            whole += value
            stays += tl.where(kept, value, 0.0)
    tl.store(out + h, tl.sum(stays, 0) / tl.sum(whole, 0))


# -- numbers per head -------------------------------------------------------------------------


@triton.jit
def ranks(mine, ok, i):
    """The rank of each number in ascending order (of equal numbers, the first comes first), and a
    matrix [each, other]: whether the other comes before."""
    other = mine[None, :]
    first = (other < mine[:, None]) | ((other == mine[:, None]) & (i[None, :] < i[:, None]))
    first = first & ok[None, :]
    return tl.sum(first.to(tl.int64), 1), first


@triton.jit
def filled(used, ok, i, total):
    """`torch.selection.fill`."""
    rank, first = ranks(used, ok, i)
    after = ok[None, :] & (first == 0) & (i[None, :] != i[:, None])
    above = tl.sum(tl.where(after, used[None, :], 0), 1)
    lifted = tl.sum((ok & (used * (rank + 1) + above <= total)).to(tl.int64), 0)
    edge = ok & (rank == tl.maximum(lifted - 1, 0))
    spare = total - tl.sum(tl.where(edge, above, 0), 0)
    level = spare // tl.maximum(lifted, 1)
    low = ok & (used <= level)
    extra = low & (tl.cumsum(low.to(tl.int64), 0) <= spare - level * lifted)
    return tl.where(lifted > 0, tl.maximum(used, level) + extra.to(tl.int64), used)


@triton.jit(do_not_specialize=["total", "heads"], do_not_specialize_on_alignment=["staying"])
def _remaining(staying, out, total, heads, HP: tl.constexpr):
    i = tl.arange(0, HP)
    tl.store(out, tl.maximum(total - tl.sum(tl.load(staying + i, mask=i < heads, other=0), 0), 0))


@triton.jit(
    do_not_specialize=["need_head", "most_head", "heads", "times", "even", "parts"],
    do_not_specialize_on_alignment=["need", "most", "total"],
)
def _share(
    need, most, total, out, need_head, most_head, heads, times, even, parts, HP: tl.constexpr
):
    i = tl.arange(0, HP)
    ok = i < heads
    all_ = tl.load(total)
    want = tl.load(need + i * need_head, mask=ok, other=0) * times + all_ * even
    limit = tl.load(most + i * most_head, mask=ok, other=0)
    all_ = tl.minimum(all_, tl.sum(limit, 0))
    full = limit * parts
    rank, first = ranks(full - want, ok, i)
    # How much is left for a head and those after it, when the heads before it are full.
    left = tl.where(first, full[None, :], tl.where(ok[None, :], want[None, :], 0))
    spare = all_ * parts - tl.sum(left, 1)
    share = heads - rank
    open_ = tl.max(tl.where(ok & ((full - want) * share >= spare), share, 0), 0)
    open_ = tl.where(open_ == 0, heads, open_)
    lift = tl.sum(tl.where(ok & (share == open_), spare, 0), 0)
    unit = open_ * parts
    exact = tl.minimum(want * open_ + lift, limit * unit)
    counts = exact // unit
    rest = exact - counts * unit
    place, _ = ranks(-rest, ok, i)
    more = place < all_ - tl.sum(tl.where(ok, counts, 0), 0)
    tl.store(out + i, counts + more.to(tl.int64), mask=ok)


@triton.jit(
    do_not_specialize=["heads", "least"],
    do_not_specialize_on_alignment=["counts", "sure", "free"],
)
def _ensure_least(counts, sure, free, out, heads, least, HP: tl.constexpr):
    i = tl.arange(0, HP)
    ok = i < heads
    mine = tl.load(counts + i, mask=ok, other=0)
    rich = mine + tl.load(sure + i, mask=ok, other=0)
    lack = tl.minimum(least - rich, tl.load(free + i, mask=ok, other=0) - mine)
    lack = tl.where(ok, tl.maximum(lack, 0), 0)
    given = tl.zeros((HP,), tl.int64)
    wanted = tl.sum(lack, 0)
    able = wanted
    while able > 0:  # the head with the most rows gives one; of equal heads, the first
        left = tl.where(ok & (given < mine) & (rich - given > least), rich - given, -1)
        top = tl.max(left, 0)
        who = tl.min(tl.where(left == top, i, HP), 0)
        given += ((i == who) & (top >= 0)).to(tl.int64)
        able = tl.where(top < 0, 0, able - 1)
    got = tl.minimum(tl.maximum(tl.sum(given, 0) - tl.cumsum(lack, 0) + lack, 0), lack)
    tl.store(out + i, mine - given + got, mask=ok)


# -- launches ----------------------------------------------------------------------------------


def _grid(rows: int, lines: int) -> tuple[int, int]:
    return max(1, -(-rows // _ROWS)), lines


def divide(pos: Tensor, sinks: int, young: int, pinned: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `torch.selection.divide`."""
    pos = lines(pos)
    heads, rows = pos.shape
    stays = torch.empty((heads, rows), dtype=torch.bool, device=pos.device)
    free = torch.empty_like(stays)
    counts = torch.empty((3, heads), dtype=torch.int64, device=pos.device)
    numbers = head_stride(pos), rows, sinks, young, pinned
    _divide[(heads,)](pos, stays, free, counts, *numbers, BN=_ROWS)
    return stays, free, counts


def remaining(total: int, staying: Tensor) -> Tensor:
    """See `torch.selection.remaining`."""
    staying = staying.contiguous()
    out = torch.empty((), dtype=torch.int64, device=staying.device)
    _remaining[(1,)](staying, out, total, len(staying), HP=power(len(staying)))
    return out


def order_key(scores: Tensor, pos: Tensor, free: Tensor) -> Tensor:
    """See `torch.selection.order_key`."""
    scores, pos, free = lines(scores.to(torch.float32)), lines(pos), lines(free)
    heads, rows = scores.shape
    out = torch.empty((heads, rows), dtype=torch.int64, device=scores.device)
    _order_key[_grid(rows, heads)](
        scores,
        pos,
        free,
        out,
        *(head_stride(t) for t in (scores, pos, free)),
        rows,
        torch.iinfo(torch.int64).min,
        BN=_ROWS,
    )
    return out


def best(
    scores: Tensor,
    pos: Tensor,
    free: Tensor,
    counts: Tensor,
    most: int,
    key: Tensor | None = None,
    also: Tensor | None = None,
) -> Tensor:
    """See `torch.selection.best`."""
    key, free = order_key(scores, pos, free) if key is None else key, lines(free)
    more = free if also is None else lines(also)
    heads, rows = key.shape
    found = key.topk(max(1, min(most, rows)), dim=1).values
    out = torch.empty((heads, rows), dtype=torch.bool, device=key.device)
    _chosen[_grid(rows, heads)](
        key,
        free,
        found,
        counts,
        more,
        out,
        head_stride(free),
        head_stride(counts),
        head_stride(more),
        rows,
        found.shape[1],
        ALSO=also is not None,
        BN=_ROWS,
    )
    return out


def wanted(
    scores: Tensor, pos: Tensor, free: Tensor, total: Tensor, most: int, key: Tensor | None = None
) -> Tensor:
    """See `torch.selection.wanted`."""
    key, free = order_key(scores, pos, free) if key is None else key, lines(free)
    heads, rows = key.shape
    found = key.flatten().topk(max(1, min(most, key.numel()))).values
    sums = torch.empty((3, heads), dtype=torch.int64, device=key.device)
    _above[(heads,)](key, free, found, total, sums, head_stride(free), rows, len(found), BN=_ROWS)
    out = torch.empty_like(sums[0])
    _wanted[(1,)](sums, total, out, heads, HP=power(heads))
    return out


def pool(scores: Tensor, order: Tensor, free: Tensor, kernel: int, how: str) -> Tensor:
    """See `torch.selection.pool`."""
    scores = scores.contiguous()
    out = torch.empty_like(scores)
    _launch_pool(scores, order, free, out, (scores.shape[-1], 0, 1, 1, 0), kernel, how)
    return out


def pool_mass(
    mass: Tensor, queries: int, join: str, order: Tensor, free: Tensor, kernel: int, how: str
) -> Tensor:
    """See `torch.selection.pool_mass`."""
    mass = lines(mass)
    heads, group, rows = mass.shape
    out = torch.empty((heads, rows), dtype=torch.float32, device=mass.device)
    layout = head_stride(mass), mass.stride(1), group, queries, _JOINS.index(join)
    _launch_pool(mass, order, free, out, layout, kernel, how)
    return out


_JOINS = ("", "mean", "sum", "max")


def _launch_pool(
    scores: Tensor,
    order: Tensor,
    free: Tensor,
    out: Tensor,
    layout: tuple[int, int, int, int, int],
    kernel: int,
    how: str,
) -> None:
    """layout: the strides between lines and in a group, its heads, the number of queries, and how
    the heads are joined."""
    free, order = lines(free), order.contiguous()
    heads, rows = free.shape
    line, member, group, queries, join = layout
    _pool[_grid(rows, out.numel() // max(1, rows))](
        scores,
        order,
        free,
        out,
        line,
        member,
        head_stride(free),
        heads,
        rows,
        order.shape[1],
        group,
        queries,
        kernel,
        MAX=how == "max",
        JOIN=join,
        BN=_ROWS,
    )


def stayed(mass: Tensor, keep: Tensor, pos: Tensor) -> Tensor:
    """See `torch.selection.stayed`."""
    mass, keep, pos = lines(mass), lines(keep), lines(pos)
    heads, group, rows = mass.shape
    out = torch.empty(heads, dtype=torch.float32, device=mass.device)
    strides = head_stride(mass), mass.stride(1), head_stride(keep), head_stride(pos)
    _stayed[(heads,)](mass, keep, pos, out, *strides, group, rows, BN=_ROWS)
    return out


def share(need: Tensor, times: int, even: int, parts: int, most: Tensor, total: Tensor) -> Tensor:
    """See `torch.selection.share`."""
    out = torch.empty(len(need), dtype=torch.int64, device=need.device)
    numbers = need.stride(0), most.stride(0), len(need), times, even, parts
    _share[(1,)](need, most, total, out, *numbers, HP=power(len(need)))
    return out


def ensure_least(counts: Tensor, sure: Tensor, free: Tensor, least: int) -> Tensor:
    """See `torch.selection.ensure_least`."""
    counts, sure, free = (t.contiguous() for t in (counts, sure, free))
    out = torch.empty_like(counts)
    _ensure_least[(1,)](counts, sure, free, out, len(counts), least, HP=power(len(counts)))
    return out


def variants() -> list[Variant]:
    """Builds for the compile gate."""
    lists = dict.fromkeys(("pos", "key", "order", "found", "sums"), "*i64")
    lists |= dict.fromkeys(("counts", "staying", "need", "most", "total"), "*i64")
    masks = dict.fromkeys(("keep", "stays", "free", "also"), "*i1")
    numbers = dict.fromkeys(("scores", "mass"), "*fp32")
    rows: dict[str, object] = {"BN": _ROWS}
    heads: dict[str, object] = {"HP": 32}
    found = []
    for fn, kinds, constants in (
        (_divide, {}, rows),
        (_order_key, {"out": "*i64", "LEAST": "i64"}, rows),
        (_chosen, {"out": "*i1", "most": "i32"}, rows | {"ALSO": True}),
        (_above, {"most": "i32"}, rows),
        (_pool, {"out": "*fp32"}, rows | {"MAX": True, "JOIN": 1}),
        (_stayed, {"out": "*fp32"}, rows),
        (_wanted, {"out": "*i64"}, heads),
        (_remaining, {"out": "*i64", "total": "i32"}, heads),
        (_share, {"out": "*i64"}, heads),
        (_ensure_least, {"out": "*i64", "sure": "*i64", "free": "*i64"}, heads),
    ):
        name: str = fn.__name__
        signature = typed(fn, lists | masks | numbers | kinds, constants)
        found.append(Variant(name.strip("_").replace("_", "-"), fn, signature, constants))
    return found
