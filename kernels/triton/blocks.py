"""A prompt that is read in blocks, in Triton: which rows of a layer leave after a block, in one
launch, and where the others move, in another.

A program chooses for one KV head. The largest score of those that leave is found by `nth`, and so
is RoCo's limit of the variance; nothing is sorted. Specification: `torch/blocks.py` for
`lowest_block` and `compacted`, for the rest the file of each policy in minikv/policies.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.triton.nth import MOST_ROWS, NO_ORDER, nth, ordered
from minikv.kernels.triton.step import load_steadiness, may_leave
from minikv.kernels.triton.tiles import head_stride, lines, power, typed
from minikv.kernels.triton.variants import WIDE, Variant

_BLOCK, _WARPS = 1024, 8
_ROWS = 32  # rows of a head that one program moves
_LIMITS = ["rows", "heads", "limit"]
_SCALARS = [*_LIMITS, "newest", "sinks", "recent", "pinned"]


@triton.jit
def _over(live, head, heads, limit, HP: tl.constexpr):
    """How many rows a head must give up; and the most that any head of the layer must."""
    i = tl.arange(0, HP)
    over = tl.maximum(tl.load(live + i, mask=i < heads, other=0) - limit, 0)
    over = tl.where(i < heads, over, 0).to(tl.int32)
    return tl.sum(tl.where(i == head, over, 0), 0), tl.max(over, 0)


@triton.jit
def _drop(orders, pos, index, count, head, rows, over, BN: tl.constexpr):
    """Write which rows stay, and how many, if the `over` rows with the lowest orders leave."""
    edge = tl.full((), -(1 << 31), tl.int32)
    below = tl.full((), 0, tl.int64)
    if over > 0:
        edge, below = nth(orders, rows, over - 1, BN)
    done = tl.full((), 0, tl.int64)
    alike = tl.full((), 0, tl.int32)
    for s in tl.range(0, rows, BN):
        j = s + tl.arange(0, BN)
        inside = j < rows
        order = tl.load(orders + j, mask=inside, other=NO_ORDER)
        live = inside & (tl.load(pos + j, mask=inside, other=-1) >= 0)
        equal = (order == edge) & (order < NO_ORDER)
        rank = alike + tl.cumsum(equal.to(tl.int32), 0)  # from 1; the oldest come first
        gone = (order < edge) | (equal & (below + rank <= over))
        keep = live & (gone == 0)
        place = done + tl.cumsum(keep.to(tl.int64), 0) - 1
        tl.store(index + place, j.to(tl.int64), mask=keep)
        alike += tl.sum(equal.to(tl.int32), 0)
        done += tl.sum(keep.to(tl.int64), 0)
    tl.store(count + head, done)


@triton.jit
def _shown(pos, j, rows, pinned):
    """The positions of rows j as the policy sees them: -1 for pinned rows, too."""
    at = tl.load(pos + j, mask=j < rows, other=-1)
    return tl.where(at < pinned, -1, at)


@triton.jit
def _any_leaves(pos, rows, newest, sinks, recent, pinned, BN: tl.constexpr):
    """How many rows a policy sees, and whether any of them is unprotected."""
    seen = tl.zeros((BN,), tl.int32)
    some = tl.zeros((BN,), tl.int32)
    for s in tl.range(0, rows, BN):
        at = _shown(pos, s + tl.arange(0, BN), rows, pinned)
        seen += (at >= 0).to(tl.int32)
        some += may_leave(at, at >= 0, newest, sinks, recent, True).to(tl.int32)
    return tl.sum(seen, 0), tl.sum(some, 0) > 0


@triton.jit(
    do_not_specialize=["scores_head", "free_head", "pos_head", *_LIMITS],
    do_not_specialize_on_alignment=["scores", "free", "pos", "live"],
)
def _lowest_block(
    scores,
    free,
    pos,
    live,
    orders,
    index,
    count,
    scores_head,
    free_head,
    pos_head,
    rows,
    heads,
    limit,
    BN: tl.constexpr,
    HP: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    mine = orders + head * rows
    over = _over(live, head, heads, limit, HP)[0]
    for s in tl.range(0, rows, BN):
        j = s + tl.arange(0, BN)
        inside = j < rows
        score = tl.load(scores + head * scores_head + j, mask=inside, other=0.0)
        may = tl.load(free + head * free_head + j, mask=inside, other=0) != 0
        tl.store(mine + j, tl.where(may, ordered(score), NO_ORDER), mask=inside)
    tl.debug_barrier()  # what other threads of the program stored is read below
    _drop(mine, pos + head * pos_head, index + head * rows, count, head, rows, over, BN)


@triton.jit(
    do_not_specialize=["scores_head", "pos_head", *_SCALARS],
    do_not_specialize_on_alignment=["scores", "pos", "live"],
)
def _unprotected_block(
    scores,
    pos,
    live,
    orders,
    index,
    count,
    scores_head,
    pos_head,
    rows,
    heads,
    limit,
    newest,
    sinks,
    recent,
    pinned,
    BN: tl.constexpr,
    HP: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    mine = orders + head * rows
    at_head = pos + head * pos_head
    over = _over(live, head, heads, limit, HP)[0]
    strict = _any_leaves(at_head, rows, newest, sinks, recent, pinned, BN)[1]
    for s in tl.range(0, rows, BN):
        j = s + tl.arange(0, BN)
        at = _shown(at_head, j, rows, pinned)
        may = may_leave(at, at >= 0, newest, sinks, recent, strict)
        score = tl.load(scores + head * scores_head + j, mask=j < rows, other=0.0)
        tl.store(mine + j, tl.where(may, ordered(score), NO_ORDER), mask=j < rows)
    tl.debug_barrier()  # what other threads of the program stored is read below
    _drop(mine, at_head, index + head * rows, count, head, rows, over, BN)


@triton.jit(
    do_not_specialize=["pos_head", "sums_head", *_SCALARS],
    do_not_specialize_on_alignment=["sums", "pos", "live", "newest_rows"],
)
def _h2o_block(
    sums,
    newest_rows,
    pos,
    live,
    orders,
    index,
    count,
    sums_head,
    pos_head,
    rows,
    heads,
    limit,
    newest,
    sinks,
    recent,
    pinned,
    BN: tl.constexpr,
    HP: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    mine = orders + head * rows
    at_head = pos + head * pos_head
    over, most = _over(live, head, heads, limit, HP)
    seen, strict = _any_leaves(at_head, rows, newest, sinks, recent, pinned, BN)
    wanted = tl.load(newest_rows + head).to(tl.int32)
    before = seen - tl.maximum(tl.minimum(wanted, seen - most), 1)  # rows older than the newest
    done = tl.full((), 0, tl.int32)
    older = tl.zeros((BN,), tl.int32)
    for s in tl.range(0, rows, BN):
        at = _shown(at_head, s + tl.arange(0, BN), rows, pinned)
        rank = done + tl.cumsum((at >= 0).to(tl.int32), 0)  # from 1
        may = may_leave(at, at >= 0, newest, sinks, recent, strict)
        older += (may & (rank <= before)).to(tl.int32)
        done += tl.sum((at >= 0).to(tl.int32), 0)
    enough = tl.sum(older, 0) >= most
    done = tl.full((), 0, tl.int32)
    for s in tl.range(0, rows, BN):
        j = s + tl.arange(0, BN)
        at = _shown(at_head, j, rows, pinned)
        rank = done + tl.cumsum((at >= 0).to(tl.int32), 0)
        may = may_leave(at, at >= 0, newest, sinks, recent, strict)
        may = may & ((rank <= before) | (enough == 0))
        total = tl.load(sums + head * sums_head + j, mask=j < rows, other=0.0)
        tl.store(mine + j, tl.where(may, ordered(total), NO_ORDER), mask=j < rows)
        done += tl.sum((at >= 0).to(tl.int32), 0)
    tl.debug_barrier()  # what other threads of the program stored is read below
    _drop(mine, at_head, index + head * rows, count, head, rows, over, BN)


@triton.jit(
    do_not_specialize=["pos_head", "sums_head", *_SCALARS],
    do_not_specialize_on_alignment=["sums", "squares", "counted", "pos", "live", "steady_rows"],
)
def _roco_block(
    sums,
    squares,
    counted,
    steady_rows,
    pos,
    live,
    orders,
    index,
    count,
    sums_head,
    pos_head,
    rows,
    heads,
    limit,
    newest,
    sinks,
    recent,
    pinned,
    BN: tl.constexpr,
    HP: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    mine = orders + head * rows
    at_head = pos + head * pos_head
    over, most = _over(live, head, heads, limit, HP)
    strict = _any_leaves(at_head, rows, newest, sinks, recent, pinned, BN)[1]
    free = tl.zeros((BN,), tl.int32)
    for s in tl.range(0, rows, BN):
        j = s + tl.arange(0, BN)
        at = _shown(at_head, j, rows, pinned)
        may = may_leave(at, at >= 0, newest, sinks, recent, strict)
        where = head * sums_head + j
        variance = load_steadiness(sums, squares, counted, where, j < rows)[1]
        tl.store(mine + j, tl.where(may, ordered(variance), NO_ORDER), mask=j < rows)
        free += may.to(tl.int32)
    tl.debug_barrier()
    few = tl.maximum(tl.load(steady_rows + head).to(tl.int32), most)
    few = tl.maximum(tl.minimum(few, tl.sum(free, 0)), 1)
    edge = nth(mine, rows, few - 1, BN)[0]
    tl.debug_barrier()
    for s in tl.range(0, rows, BN):
        j = s + tl.arange(0, BN)
        order = tl.load(mine + j, mask=j < rows, other=NO_ORDER)
        may = (order <= edge) & (order < NO_ORDER)
        where = head * sums_head + j
        mean = load_steadiness(sums, squares, counted, where, j < rows)[0]
        tl.store(mine + j, tl.where(may, ordered(mean), NO_ORDER), mask=j < rows)
    tl.debug_barrier()
    _drop(mine, at_head, index + head * rows, count, head, rows, over, BN)


@triton.jit(do_not_specialize=["rows"])
def _compacted(
    index,
    count,
    k,
    v,
    pos,
    columns,
    new_k,
    new_v,
    new_pos,
    new_columns,
    rows,
    D: tl.constexpr,
    DP: tl.constexpr,
    BN: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = j < rows
    n = tl.load(count + head)
    real = j < n
    row = tl.load(index + head * rows + j, mask=real, other=0)
    source = head * rows + row
    target = head * rows + j
    at = tl.load(pos + source, mask=real, other=-1)
    tl.store(new_pos + target, at, mask=inside)
    for i in tl.static_range(len(columns)):
        number = tl.load(columns[i] + source, mask=real, other=0)
        tl.store(new_columns[i] + target, number, mask=inside)
    if tl.program_id(0) * BN < n:
        d = tl.arange(0, DP)
        some = real[:, None] & (d < D)[None, :]
        there = source[:, None] * D + d[None, :]
        here = target[:, None] * D + d[None, :]
        key = tl.load(k + there, mask=some, other=0.0)
        value = tl.load(v + there, mask=some, other=0.0)
        tl.store(new_k + here, key, mask=some)
        tl.store(new_v + here, value, mask=some)


def _result(pos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for ordered scores [H, N], for the index [H, N] and for the count [H]."""
    assert pos.shape[1] < MOST_ROWS.value
    index = torch.empty(pos.shape, dtype=torch.int64, device=pos.device)
    count = torch.empty(len(pos), dtype=torch.int64, device=pos.device)
    return torch.empty_like(index, dtype=torch.int32), index, count


def lowest_block(
    scores: Tensor, free: Tensor, pos: Tensor, live: Tensor, limit: int, *, block: int = _BLOCK
) -> tuple[Tensor, Tensor]:
    """See `torch.blocks.lowest_block`. `block`: rows that a program reads at once."""
    scores, free, pos = lines(scores.to(torch.float32)), lines(free), lines(pos)
    orders, index, count = _result(pos)
    heads, rows = pos.shape
    _lowest_block[(heads,)](
        scores,
        free,
        pos,
        live.contiguous(),
        orders,
        index,
        count,
        *map(head_stride, (scores, free, pos)),
        rows,
        heads,
        limit,
        BN=block,
        HP=power(heads),
        num_warps=_WARPS,
    )
    return index, count


def unprotected_block(
    scores: Tensor,
    pos: Tensor,
    live: Tensor,
    limit: int,
    position: int,
    sinks: int,
    recent: int,
    pinned: int,
    *,
    block: int = _BLOCK,
) -> tuple[Tensor, Tensor]:
    """As `torch.blocks.lowest_block`, for the rows that are neither sinks nor recent nor pinned. If
    a head has none, all that are not pinned may leave but the newest.

    position: tokens counted.
    """
    scores, pos = lines(scores.to(torch.float32)), lines(pos)
    orders, index, count = _result(pos)
    heads, rows = pos.shape
    _unprotected_block[(heads,)](
        scores,
        pos,
        live.contiguous(),
        orders,
        index,
        count,
        head_stride(scores),
        head_stride(pos),
        rows,
        heads,
        limit,
        position - 1,
        sinks,
        recent,
        pinned,
        BN=block,
        HP=power(heads),
        num_warps=_WARPS,
    )
    return index, count


def h2o_block(
    sums: Tensor,
    newest_rows: Tensor,
    pos: Tensor,
    live: Tensor,
    limit: int,
    position: int,
    sinks: int,
    recent: int,
    pinned: int,
    *,
    block: int = _BLOCK,
) -> tuple[Tensor, Tensor]:
    """H2O (arXiv 2306.14048, section 4): the rows with the lowest sums [H, N] leave.

    newest_rows int64 [H]: how many of a head's newest rows are kept. position: tokens counted.
    Other arguments and results: as in `torch.blocks.lowest_block`.
    """
    sums, pos = lines(sums), lines(pos)
    orders, index, count = _result(pos)
    heads, rows = pos.shape
    _h2o_block[(heads,)](
        sums,
        newest_rows.contiguous(),
        pos,
        live.contiguous(),
        orders,
        index,
        count,
        head_stride(sums),
        head_stride(pos),
        rows,
        heads,
        limit,
        position - 1,
        sinks,
        recent,
        pinned,
        BN=block,
        HP=power(heads),
        num_warps=_WARPS,
    )
    return index, count


def roco_block(
    sums: Tensor,
    squares: Tensor,
    counts: Tensor,
    steady_rows: Tensor,
    pos: Tensor,
    live: Tensor,
    limit: int,
    position: int,
    sinks: int,
    recent: int,
    pinned: int,
    *,
    block: int = _BLOCK,
) -> tuple[Tensor, Tensor]:
    """RoCo (arXiv 2402.06262, section 4.2): of the rows with the smallest variances, those with the
    lowest means leave.

    steady_rows int64 [H]: how many rows with the smallest variances are candidates. position:
    tokens counted. Other arguments and results: as in `torch.blocks.lowest_block`.
    """
    sums, squares, counts = (t.contiguous() for t in (sums, squares, counts))
    pos = lines(pos)
    orders, index, count = _result(pos)
    heads, rows = pos.shape
    _roco_block[(heads,)](
        sums,
        squares,
        counts,
        steady_rows.contiguous(),
        pos,
        live.contiguous(),
        orders,
        index,
        count,
        head_stride(sums),
        head_stride(pos),
        rows,
        heads,
        limit,
        position - 1,
        sinks,
        recent,
        pinned,
        BN=block,
        HP=power(heads),
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )
    return index, count


def compacted(
    index: Tensor, count: Tensor, k: Tensor, v: Tensor, pos: Tensor, columns: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """See `torch.blocks.compacted`."""
    k, v, pos, *rest = (t.contiguous() for t in (k, v, pos, *columns))
    made = [torch.empty_like(t) for t in (k, v, pos, *rest)]
    heads, rows, size = k.shape
    _compacted[(-(-rows // _ROWS), heads)](
        index.contiguous(),
        count,
        k,
        v,
        pos,
        tuple(rest),
        *made[:3],
        tuple(made[3:]),
        rows,
        D=size,
        DP=power(size),
        BN=_ROWS,
        num_warps=4,
    )
    return made[0], made[1], made[2], made[3:]


def variants() -> list[Variant]:
    """Builds for the compile gate."""
    kinds: dict[str, str | tuple[str, ...]] = dict.fromkeys(
        ("scores", "sums", "squares", "counted"), "*fp32"
    )
    kinds |= dict.fromkeys(("newest_rows", "steady_rows", "pos", "live", "index", "count"), "*i64")
    kinds |= {"orders": "*i32", "free": "*i1"}
    found = []
    for fn in (_lowest_block, _unprotected_block, _h2o_block, _roco_block):
        constants: dict[str, object] = {"BN": _BLOCK, "HP": 8}
        name: str = fn.__name__
        signature = typed(fn, kinds, constants)
        name = name.strip("_").replace("_", "-")
        found.append(Variant(name, fn, signature, constants, warps=_WARPS))
    for size, kind, more in (
        (128, "bf16", ("*fp32",) * 3),
        (80, "fp32", ("*i64", "*i16")),
        (128, "fp16", ()),
    ):
        data = dict.fromkeys(("k", "v", "new_k", "new_v"), f"*{kind}")
        columns = dict.fromkeys(("columns", "new_columns"), more)
        constants = {"D": size, "DP": power(size), "BN": _ROWS}
        signature = typed(_compacted, kinds | {"new_pos": "*i64"} | data | columns, constants)
        found.append(
            Variant(
                f"compacted-{kind}-d{size}-columns{len(more)}",
                _compacted,
                signature,
                constants,
                reads={"k": WIDE, "v": WIDE},
            )
        )
    return found
