"""Attention of a prompt's queries over the rows of earlier turns, in Triton, without padding; and
`merge`, which joins attention over disjoint sets of rows. Attention within a prompt is torch's, or
cuDNN's where that is faster.

Every head has its own number of earlier rows. All come before the queries, so no causal mask is
needed; `merge` joins the causal part by its log-sum-exp. If there are too few queries to occupy the
device, segments are divided into spans, whose results are joined in the same way.
Specification: `plain.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.attention import cudnn, plain
from minikv.kernels.decode.plain import Segments
from minikv.kernels.gpu import attention_tile, compiled_for, in_rows, power, row_stride

_ROWS = 16  # queries of a head that one program joins
_INTEGERS = [f"{part}_{dim}" for part in ("a", "b") for dim in ("head", "group", "row")]


@triton.jit(
    do_not_specialize=[*_INTEGERS, "group", "rows"],
    do_not_specialize_on_alignment=["a_lse", "b_lse"],
)
def _merge(
    a,
    b,
    a_lse,
    b_lse,
    out,
    lse,
    a_head,
    a_group,
    a_row,
    b_head,
    b_group,
    b_row,
    group,
    rows,
    D: tl.constexpr,
    DP: tl.constexpr,
    BT: tl.constexpr,
):
    line = tl.program_id(1)
    h = (line // group).to(tl.int64)
    g = line % group
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    real = t < rows
    d = tl.arange(0, DP)
    ok = real[:, None] & (d < D)[None, :]
    one = tl.load(a_lse + line.to(tl.int64) * rows + t, mask=real, other=0.0)
    two = tl.load(b_lse + line.to(tl.int64) * rows + t, mask=real, other=0.0)
    top = tl.maximum(one, two)
    base = tl.where(top == -float("inf"), 0.0, top)  # neither saw a row: avoids inf - inf
    first = tl.exp(one - base)
    second = tl.exp(two - base)
    both = first + second
    share = 1.0 / tl.where(both == 0.0, 1.0, both)
    at = h * a_head + g * a_group + t.to(tl.int64) * a_row
    left = tl.load(a + at[:, None] * D + d[None, :], mask=ok, other=0.0).to(tl.float32)
    at = h * b_head + g * b_group + t.to(tl.int64) * b_row
    right = tl.load(b + at[:, None] * D + d[None, :], mask=ok, other=0.0).to(tl.float32)
    # The output of a part that saw no row is undefined.
    left = tl.where((first == 0.0)[:, None], 0.0, left * (first * share)[:, None])
    right = tl.where((second == 0.0)[:, None], 0.0, right * (second * share)[:, None])
    at = t.to(tl.int64) * tl.num_programs(1) + line
    tl.store(out + at[:, None] * D + d[None, :], (left + right).to(out.dtype.element_ty), mask=ok)
    tl.store(lse + line.to(tl.int64) * rows + t, base + tl.log(both), mask=real)


def last_rows_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """See `plain.last_rows_attention`. Long prompts by cuDNN where that is faster."""
    found = cudnn.last_rows_attention(q, k, v, _two)
    return plain.last_rows_attention(q, k, v) if found is None else found


def merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """See `plain.merge`. In memory the output is [T, H, G, D]. More than two parts are
    joined one after the other, in float32 until the last."""
    kind = parts[0][0].dtype
    joined, whole = parts[0]
    for i, (out, lse) in enumerate(parts[1:], 2):
        last = i == len(parts)
        joined, whole = _two((joined, whole), (out, lse), kind if last else torch.float32)
    return joined, whole


def _two(
    one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor], kind: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Join two parts. The output is of dtype `kind`."""
    (a, a_lse), (b, b_lse) = one, two
    a, b = in_rows(a), in_rows(b)
    heads, group, rows, size = a.shape
    out = a.new_empty((rows, heads, group, size), dtype=kind)
    lse = a_lse.new_empty((heads, group, rows))
    given = a, b, a_lse.contiguous(), b_lse.contiguous(), out, lse
    strides = [row_stride(x, dim) for x in (a, b) for dim in range(3)]
    sizes = {"D": size, "DP": power(size), "BT": _ROWS}
    grid = -(-rows // _ROWS), heads * group
    _merge[grid](*given, *strides, group, rows, **sizes, num_warps=4)
    return out.permute(1, 2, 0, 3), lse


_PROGRAMS = 256  # enough to occupy the device


@triton.jit(
    do_not_specialize=["q_head", "q_group", "q_row", "rows", "span", "window"],
    do_not_specialize_on_alignment=["start", "length", "free_slot", "pos", "q_pos"],
)
def _ragged_prefill(
    q,
    k,
    v,
    start,
    length,
    free_slot,
    pos,
    q_pos,
    outs,
    lse,
    q_head,
    q_group,
    q_row,
    rows,
    span,
    window,
    scale,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WINDOW: tl.constexpr,
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
):
    h = tl.program_id(1).to(tl.int64)
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    i = r // G
    g = r % G
    real = i < rows
    d = tl.arange(0, DP)
    narrow = (d < D)[None, :]
    line = h * q_head + g.to(tl.int64) * q_group + i.to(tl.int64) * q_row
    query = tl.load(q + line[:, None] * D + d[None, :], mask=real[:, None] & narrow, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    if WINDOW:
        now = tl.load(q_pos + i, mask=real, other=0).to(tl.int32)
    begin = tl.load(start + h)
    free = tl.load(free_slot + h)
    lo = tl.program_id(2) * span
    hi = tl.minimum(lo + span, tl.load(length + h).to(tl.int32))
    best = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    sums = tl.zeros((BM, DP), tl.float32)
    for s in tl.range(lo, hi, BN, num_stages=STAGES):
        j = begin + s + tl.arange(0, BN)
        there = (j < begin + hi) & (j != free)
        deep = there[None, :] & (d < D)[:, None]
        key = tl.load(k + j[None, :] * D + d[:, None], mask=deep, other=0.0)
        if UPCAST:
            key = key.to(tl.float32)
        x = tl.dot(query, key, input_precision="ieee") * scale
        seen = there[None, :]
        if WINDOW:
            at = tl.load(pos + j, mask=there, other=-1)
            seen = seen & (now[:, None] - at[None, :] < window)
        x = tl.where(seen, x, -float("inf"))
        top = tl.maximum(best, tl.max(x, 1))
        base = tl.where(top == -float("inf"), 0.0, top)  # no row seen yet: avoids inf - inf
        fade = tl.exp2(best - base)
        p = tl.exp2(x - base[:, None])
        total = total * fade + tl.sum(p, 1)
        value = tl.load(v + j[:, None] * D + d[None, :], mask=there[:, None] & narrow, other=0.0)
        if UPCAST:
            value = value.to(tl.float32)
        sums = sums * fade[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee")
        best = top
    base = tl.where(best == -float("inf"), 0.0, best)
    # A query that sees no row: zeros, and -inf from the logarithm of 0.
    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    total_lse = (base + tl.log2(total)) * 0.6931471805599453
    out = ((tl.program_id(2) * tl.num_programs(1) + h) * G + g) * rows + i
    here = outs + out[:, None] * D + d[None, :]
    tl.store(here, sums.to(outs.dtype.element_ty), mask=real[:, None] & narrow)
    tl.store(lse + out, total_lse, mask=real)


def ragged_prefill(
    q: Tensor,
    rows: Segments,
    free_slot: Tensor,
    q_pos: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See `plain.ragged_prefill`."""
    q, q_pos = in_rows(q), None if q_pos is None else q_pos.contiguous()
    k, v, start, length, most, pos, *_ = rows
    heads, group, queries, size = q.shape
    lines = queries * group
    tile = attention_tile(q.dtype, size, lines)
    blocks = -(-lines // tile.left)
    spans = max(1, min(-(-most // (4 * tile.right)), _PROGRAMS // (heads * blocks)))
    span = max(1, -(-most // (spans * tile.right))) * tile.right
    kind = q.dtype if spans == 1 else torch.float32
    outs = q.new_empty((spans, heads, group, queries, size), dtype=kind)
    lse = q.new_empty((spans, heads, group, queries), dtype=torch.float32)
    windowed = window is not None and pos is not None and q_pos is not None
    _ragged_prefill[(blocks, heads, spans)](
        *(q, k, v, start, length, free_slot),
        *((pos, q_pos) if windowed else (start, start)),
        *(outs, lse, *(row_stride(q, dim) for dim in range(3)), queries, span, window or 0),
        _LOG2E / math.sqrt(size),
        **{"BM": tile.left, "BN": tile.right, "STAGES": tile.stages, **compiled_for(q, tile)},
        WINDOW=windowed,
    )
    if spans == 1:
        return outs[0], lse[0]
    total_lse = torch.logsumexp(lse, 0)
    share = (lse - total_lse.masked_fill(total_lse == -math.inf, 0.0)).exp()
    return (outs * share[..., None]).sum(0).to(q.dtype), total_lse


_LOG2E = 1.4426950408889634
