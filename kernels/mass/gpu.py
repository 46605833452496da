"""The attention that queries give each row, in Triton: column sums of the softmax. Only
`each_attention` stores T x N probabilities.

A program has a block of keys of one KV head and reads all queries that see them, so no two programs
add to the same number. Keys are the rows of its products, so sums over queries stay inside a warp.
It needs the log-sum-exp of each query, which attention returns. Specification:
`plain.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.gpu import (
    Tile,
    compiled_for,
    head_stride,
    in_rows,
    lines,
    power,
    row_stride,
    width,
)
from minikv.kernels.mass.plain import Part, Queries, rows_lse, with_index

_FAR = tl.constexpr(1 << 30)  # a position after all others
_FEW = 64  # queries at the end of a prompt, which see nearly all rows
_INTEGERS = (
    "q_head q_group q_row k_head k_row index_head pos_head mass_head mass_group squares_head "
    "lse_line rows keys window first begin columns"
).split()


@triton.jit
def _first(positions, rows, least):
    """The first of `rows` ascending positions that is at least `least`, or `rows`."""
    lo = tl.full((), 0, tl.int32)
    hi = tl.full((), 0, tl.int32) + rows
    while lo < hi:
        middle = (lo + hi) // 2
        below = tl.load(positions + middle) < least
        lo = tl.where(below, middle + 1, lo)
        hi = tl.where(below, hi, middle)
    return lo


# Slices may have any alignment. A build for each would take seconds in the middle of a turn.
@triton.jit(
    do_not_specialize=["fresh", *_INTEGERS[:-3]],
    do_not_specialize_on_alignment=["index", "lse", "q_pos", "k_pos", "mass", "squares"],
)
def _mass(
    q,
    k,
    index,
    lse,
    q_pos,
    k_pos,
    mass,
    squares,
    q_head,
    q_group,
    q_row,
    k_head,
    k_row,
    index_head,
    pos_head,
    lse_line,
    mass_head,
    mass_group,
    squares_head,
    rows,
    keys,
    window,
    fresh,
    scale,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    INDEXED: tl.constexpr,
    WINDOW: tl.constexpr,
    PEAK: tl.constexpr,
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
    SEARCH: tl.constexpr,
):
    h = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = j < keys
    d = tl.arange(0, DP)
    at = tl.load(k_pos + h * pos_head + j, mask=inside, other=-1).to(tl.int32)
    lowest = tl.min(tl.where(at < 0, _FAR, at), 0)
    highest = tl.max(at, 0)
    at = tl.where(at < 0, _FAR, at)  # no query is as late
    if INDEXED:
        row = tl.load(index + h * index_head + j, mask=inside, other=0).to(tl.int64)
    else:
        row = h * k_head + j.to(tl.int64) * k_row
    # The index of a missing row may be anything. A row without an index is read before it is known
    # to be missing: the result, perhaps NaN, stays in its own row, which no query sees.
    real_key = (at < _FAR) if INDEXED else inside
    there = real_key[:, None] & (d < D)[None, :]
    key = tl.load(k + row[:, None] * D + d[None, :], mask=there, other=0.0)
    if UPCAST:
        key = key.to(tl.float32)
    first = tl.full((), 0, tl.int32)
    last = rows
    if SEARCH:  # its loads wait for each other: too slow for a few queries
        first = _first(q_pos, rows, lowest)
        if WINDOW:
            last = _first(q_pos, rows, highest + window)
    g_ = tl.arange(0, GP)
    sums = tl.zeros((BN, GP), tl.float32)
    square = tl.zeros((BN,), tl.float32)
    mean = tl.zeros((BN, BM), tl.float32)
    for step in tl.range(first // BM * G, tl.cdiv(last, BM) * G, num_stages=STAGES):
        g = step % G
        i = step // G * BM + tl.arange(0, BM)
        real = i < rows
        line = h * q_head + g * q_group + i.to(tl.int64) * q_row
        query = tl.load(
            q + line[None, :] * D + d[:, None], mask=real[None, :] & (d < D)[:, None], other=0.0
        )
        if UPCAST:
            query = query.to(tl.float32)
        whole = tl.load(lse + (h * G + g) * lse_line + i, mask=real, other=0.0) * 1.4426950408889634
        now = tl.load(q_pos + i, mask=real, other=-1).to(tl.int32)
        x = tl.dot(key, query, input_precision="ieee") * scale - whole[None, :]
        seen = now[None, :] >= at[:, None]
        if WINDOW:
            seen = seen & (now[None, :] - at[:, None] < window)
        p = tl.where(seen, tl.exp2(x), 0.0)
        if PEAK:
            top = tl.max(p, 1)[:, None]
            sums = tl.where(g_[None, :] == g, tl.maximum(sums, top), sums)
        else:
            sums += tl.where(g_[None, :] == g, tl.sum(p, 1)[:, None], 0.0)
            if G == 1:
                square += tl.sum(p * p, 1)
            else:  # after the last head of the group the mean is complete
                mean += p
                full = g == G - 1
                square += tl.sum(tl.where(full, mean * mean, 0.0), 1)
                mean = tl.where(full, 0.0, mean)
    square = square * (1.0 / (G * G))
    mass_at = mass + h * mass_head + g_[None, :] * mass_group + j[:, None]
    some = inside[:, None] & (g_ < G)[None, :]
    squares_at = squares + h * squares_head + j
    if not PEAK:
        if fresh == 0:
            sums += tl.load(mass_at, mask=some, other=0.0)
            square += tl.load(squares_at, mask=inside, other=0.0)
        tl.store(squares_at, square, mask=inside)
    tl.store(mass_at, sums, mask=some)


@triton.jit(
    do_not_specialize=_INTEGERS,
    do_not_specialize_on_alignment=["index", "lse", "q_pos", "k_pos", "out"],
)
def _each(
    q,
    k,
    index,
    lse,
    q_pos,
    k_pos,
    out,
    q_head,
    q_group,
    q_row,
    k_head,
    k_row,
    index_head,
    pos_head,
    lse_line,
    rows,
    keys,
    window,
    first,
    begin,
    columns,
    scale,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    INDEXED: tl.constexpr,
    WINDOW: tl.constexpr,
    UPCAST: tl.constexpr,
):
    h = (first + tl.program_id(1)).to(tl.int64)
    r = tl.program_id(2) * BM + tl.arange(0, BM)
    i = r // G
    g = r % G
    real = i < rows
    d = tl.arange(0, DP)
    line = h * q_head + g.to(tl.int64) * q_group + i.to(tl.int64) * q_row
    query = tl.load(
        q + line[:, None] * D + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0
    )
    if UPCAST:
        query = query.to(tl.float32)
    now = tl.load(q_pos + i, mask=real, other=-1).to(tl.int32)
    whole = tl.load(lse + (h * G + g) * lse_line + i, mask=real, other=0.0) * 1.4426950408889634
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = j < keys
    at = tl.load(k_pos + h * pos_head + j, mask=inside, other=-1).to(tl.int32)
    at = tl.where(at < 0, _FAR, at)
    if INDEXED:
        row = tl.load(index + h * index_head + j, mask=inside, other=0).to(tl.int64)
    else:
        row = h * k_head + j.to(tl.int64) * k_row
    there = (at < _FAR)[None, :] & (d < D)[:, None]
    key = tl.load(k + row[None, :] * D + d[:, None], mask=there, other=0.0)
    if UPCAST:
        key = key.to(tl.float32)
    x = tl.dot(query, key, input_precision="ieee") * scale - whole[:, None]
    seen = now[:, None] >= at[None, :]
    if WINDOW:
        seen = seen & (now[:, None] - at[None, :] < window)
    p = tl.where(seen, tl.exp2(x), 0.0)
    target = ((tl.program_id(1).to(tl.int64) * G + g) * rows + i) * columns + begin
    tl.store(out + target[:, None] + j[None, :], p, mask=real[:, None] & inside[None, :])


_LOG2E = 1.4426950408889634


def _tile(dtype: torch.dtype, size: int, rows: int) -> Tile:
    """How many keys and how many queries one product of `_mass` has."""
    wide = width(size)
    if dtype == torch.float32:  # no matrix instruction takes float32 unrounded
        return Tile(32, 32, 8, 1) if wide <= 128 else Tile(16, 16, 4, 1)
    if wide > 128:
        return Tile(64, 32, 4, 2)
    if rows <= _FEW:  # few registers, so that a multiprocessor runs two programs alternately
        return Tile(128, min(32, max(16, power(rows))), 8, 2)
    return Tile(128, 64, 8, 3)


def _span_tile(dtype: torch.dtype, size: int, lines: int) -> Tile:
    """How many queries and keys one product of `_each` has; `lines`: queries of all heads of a
    group."""
    wide = width(size)
    if dtype == torch.float32:
        return Tile(32, 32, 8, 1) if wide <= 128 else Tile(16, 16, 4, 1)
    return Tile(min(64, max(16, power(lines))), 64 if wide <= 128 else 32, 4, 3)


def add_attention_mass(
    mass: Tensor, squares: Tensor, queries: Queries, part: Part, *, fresh: bool = False
) -> None:
    """See `plain.add_attention_mass`."""
    _launch(mass, squares, queries, part, fresh=fresh)


def each_attention(queries: Queries, parts: Sequence[Part], heads: slice) -> Tensor:
    """See `plain.each_attention`."""
    q, q_pos, window, lse = _dense(queries)
    _, group, rows, size = q.shape
    count, columns = heads.stop - heads.start, sum(part[1].shape[1] for part in parts)
    out = q.new_empty((count, group, rows, columns), dtype=torch.float32)
    tile, begin = _span_tile(q.dtype, size, rows * group), 0
    for k, k_pos, index in map(with_index, parts):
        keys = k_pos.shape[1]
        if keys == 0:
            continue
        k = in_rows(k)
        sizes = {"BM": tile.left, "BN": tile.right, **compiled_for(q, tile)}
        _each[(-(-keys // tile.right), count, -(-rows * group // tile.left))](
            *(q, k, k if index is None else index, lse, q_pos, k_pos, out),
            *_strides(q, k, index, k_pos, lse),
            *(rows, keys, window or 0, heads.start, begin, columns, _LOG2E / math.sqrt(size)),
            **sizes,
            INDEXED=index is not None,
            WINDOW=window is not None,
        )
        begin += keys
    return out


def peak_attention(
    queries: Queries, parts: Sequence[Part], scored: int, scale: Tensor | None = None
) -> Tensor:
    """See `plain.peak_attention`."""
    lse = rows_lse(queries, parts) if queries.lse is None else queries.lse
    if scale is not None:
        lse = lse - scale.float().log()
    q, part = queries.q, parts[scored]
    peak = q.new_empty((*q.shape[:2], part[1].shape[1]), dtype=torch.float32)
    _launch(peak, peak[:, 0], queries._replace(lse=lse), part, peak=True)
    return peak


def _launch(
    mass: Tensor,
    squares: Tensor,
    queries: Queries,
    part: Part,
    *,
    peak: bool = False,
    fresh: bool = False,
) -> None:
    """Add the attention that the queries give the keys of one part to `mass` and `squares`. peak:
    write the largest probability to `mass`, and nothing to `squares`. fresh: these are not read."""
    k, k_pos, index = with_index(part)
    q, q_pos, window, lse = _dense(queries)
    k, (heads, group, rows, size), keys = in_rows(k), q.shape, k_pos.shape[1]
    if keys == 0:
        return
    tile = _tile(q.dtype, size, rows)
    sizes = {"GP": power(group), "BM": tile.right, "BN": tile.left, "STAGES": tile.stages}
    _mass[(-(-keys // tile.left), heads)](
        *(q, k, k if index is None else index, lse, q_pos, k_pos, mass, squares),
        *_strides(q, k, index, k_pos, lse),
        *(*mass.stride()[:2], squares.stride(0), rows, keys, window or 0, int(fresh)),
        _LOG2E / math.sqrt(size),
        **sizes,
        **compiled_for(q, tile),
        INDEXED=index is not None,
        WINDOW=window is not None,
        PEAK=peak,
        SEARCH=rows > _FEW,
    )


def _dense(queries: Queries) -> tuple[Tensor, Tensor, int | None, Tensor]:
    """The queries in the form for the kernels: lse [H, G, T] as lines [H * G, T] with one stride.
    For a prompt's last queries, the lines are the ends of longer lines."""
    q, q_pos, window, lse = queries
    assert lse is not None
    return in_rows(q), q_pos.contiguous(), window, lines(lse.flatten(0, 1))


def _strides(
    q: Tensor, k: Tensor, index: Tensor | None, k_pos: Tensor, lse: Tensor
) -> tuple[int, ...]:
    """Of q [H, G, T, D] over all but D, of k [H, N, D] over heads and rows, in rows; of the index,
    of k_pos over heads, and of lse."""
    keys = (0, 0, index.stride(0)) if index is not None else (row_stride(k, 0), row_stride(k, 1), 0)
    return *(row_stride(q, dim) for dim in range(3)), *keys, head_stride(k_pos), lse.stride(0)
