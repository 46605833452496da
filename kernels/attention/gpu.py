"""Attention of a prompt's queries over rows whose positions decide what a query sees, and joining
attention over disjoint sets of rows, in Triton: one launch for two sets and all heads.

If there are too few queries to occupy the device, the rows are divided into spans, and another
launch joins their results. Specification: `torch/attention.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import math
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.attention import cudnn, plain
from minikv.kernels.gpu import (
    Tile,
    attention_tile,
    head_stride,
    in_rows,
    power,
    row_stride,
    typed,
    upcast,
    width,
)
from minikv.kernels.gpu_variants import WIDE, Variant

_ROWS = 16  # queries of a head that one program joins
_PROGRAMS = 256  # enough to occupy the device
_LOG2E = 1.4426950408889634
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


@triton.jit(
    do_not_specialize=[
        *("q_head", "q_group", "q_row", "k_head", "k_row", "v_head", "v_row", "pos_head"),
        *("rows", "keys", "span", "window"),
    ],
    do_not_specialize_on_alignment=["q_pos", "k_pos"],
)
def _visible(
    q,
    k,
    v,
    q_pos,
    k_pos,
    outs,
    lse,
    q_head,
    q_group,
    q_row,
    k_head,
    k_row,
    v_head,
    v_row,
    pos_head,
    rows,
    keys,
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
    heads = tl.num_programs(1)
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
    now = tl.load(q_pos + i, mask=real, other=-1).to(tl.int32)
    lo = tl.program_id(2) * span
    hi = tl.minimum(lo + span, keys)
    best = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    sums = tl.zeros((BM, DP), tl.float32)
    for s in tl.range(lo, hi, BN, num_stages=STAGES):
        j = s + tl.arange(0, BN)
        at = tl.load(k_pos + h * pos_head + j, mask=j < hi, other=-1).to(tl.int32)
        there = at >= 0  # what lies elsewhere may be NaN
        row = h * k_head + j.to(tl.int64) * k_row
        key = tl.load(
            k + row[None, :] * D + d[:, None], mask=there[None, :] & (d < D)[:, None], other=0.0
        )
        if UPCAST:
            key = key.to(tl.float32)
        x = tl.dot(query, key, input_precision="ieee") * scale
        seen = there[None, :] & (now[:, None] >= at[None, :])
        if WINDOW:
            seen = seen & (now[:, None] - at[None, :] < window)
        x = tl.where(seen, x, -float("inf"))
        top = tl.maximum(best, tl.max(x, 1))
        base = tl.where(top == -float("inf"), 0.0, top)  # no row seen yet: avoids inf - inf
        fade = tl.exp2(best - base)
        p = tl.exp2(x - base[:, None])
        total = total * fade + tl.sum(p, 1)
        row = h * v_head + j.to(tl.int64) * v_row
        value = tl.load(v + row[:, None] * D + d[None, :], mask=there[:, None] & narrow, other=0.0)
        if UPCAST:
            value = value.to(tl.float32)
        sums = sums * fade[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee")
        best = top
    base = tl.where(best == -float("inf"), 0.0, best)
    # A query that sees no row: zeros, and -inf from the logarithm of 0.
    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    whole = (base + tl.log2(total)) * 0.6931471805599453
    out = ((tl.program_id(2).to(tl.int64) * rows + i) * heads + h) * G + g
    tl.store(
        outs + out[:, None] * D + d[None, :],
        sums.to(outs.dtype.element_ty),
        mask=real[:, None] & narrow,
    )
    out = ((tl.program_id(2).to(tl.int64) * heads + h) * G + g) * rows + i
    tl.store(lse + out, whole, mask=real)


@triton.jit(do_not_specialize=["spans", "lines", "rows"])
def _joined(
    outs, lse, out, whole, spans, lines, rows, D: tl.constexpr, DP: tl.constexpr, BT: tl.constexpr
):
    """Join the spans of `_visible`: outs [spans, T, lines, D], lse [spans, lines, T]."""
    r = tl.program_id(0) * BT + tl.arange(0, BT)  # of T x lines
    real = r < rows * lines
    place = r % lines * rows + r // lines  # in a span of lse
    d = tl.arange(0, DP)
    ok = real[:, None] & (d < D)[None, :]
    top = tl.full((BT,), -float("inf"), tl.float32)
    mine = tl.full((), 0, tl.int64)
    for _ in tl.range(0, spans):
        top = tl.maximum(top, tl.load(lse + mine + place, mask=real, other=-float("inf")))
        mine += rows * lines
    base = tl.where(top == -float("inf"), 0.0, top)
    total = tl.zeros((BT,), tl.float32)
    sums = tl.zeros((BT, DP), tl.float32)
    mine = tl.full((), 0, tl.int64)
    for _ in tl.range(0, spans):
        part = tl.exp(tl.load(lse + mine + place, mask=real, other=-float("inf")) - base)
        at = (mine + r)[:, None] * D + d[None, :]
        sums += part[:, None] * tl.load(outs + at, mask=ok, other=0.0)
        total += part
        mine += rows * lines
    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    at = r.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=ok)
    tl.store(whole + place, base + tl.log(total), mask=real)


def _tile(dtype: torch.dtype, size: int, lines: int) -> Tile:
    """As `attention_tile`. A tile of 64 lines and its mask do not fit the registers of 4 warps."""
    tile = attention_tile(dtype, size, lines)
    return replace(tile, warps=8) if tile.left == 64 else tile


def visible_attention(
    q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, window: int | None
) -> tuple[Tensor, Tensor]:
    """See `torch.attention.visible_attention`. In memory the output is [T, H, G, D]."""
    q, k, v, q_pos = in_rows(q), in_rows(k), in_rows(v), q_pos.contiguous()
    heads, group, rows, size = q.shape
    keys, lines = k.shape[1], rows * group
    tile = _tile(q.dtype, size, lines)
    blocks = -(-lines // tile.left)
    spans = max(1, min(-(-keys // (4 * tile.right)), _PROGRAMS // (heads * blocks)))
    span = -(-keys // (spans * tile.right)) * tile.right
    spans = -(-keys // span)
    kind = q.dtype if spans == 1 else torch.float32
    outs = q.new_empty((spans, rows, heads, group, size), dtype=kind)
    lse = q.new_empty((spans, heads, group, rows), dtype=torch.float32)
    _visible[(blocks, heads, spans)](
        q,
        k,
        v,
        q_pos,
        k_pos,
        outs,
        lse,
        *(row_stride(q, dim) for dim in (0, 1, 2)),
        *(row_stride(t, dim) for t in (k, v) for dim in (0, 1)),
        head_stride(k_pos),
        rows,
        keys,
        span,
        window or 0,
        _LOG2E / math.sqrt(size),
        G=group,
        D=size,
        DP=width(size),
        BM=tile.left,
        BN=tile.right,
        WINDOW=window is not None,
        UPCAST=upcast(q.dtype),
        STAGES=tile.stages,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    out, whole = outs[0], lse[0]
    if spans > 1:
        out, whole = torch.empty_like(out, dtype=q.dtype), torch.empty_like(whole)
        _joined[(-(-rows * heads * group // _ROWS),)](
            outs,
            lse,
            out,
            whole,
            spans,
            heads * group,
            rows,
            D=size,
            DP=power(size),
            BT=_ROWS,
            num_warps=4,
        )
    return out.permute(1, 2, 0, 3), whole


def last_rows_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """See `torch.attention.last_rows_attention`. Long prompts by cuDNN where that is faster."""
    found = cudnn.last_rows_attention(q, k, v, _two)
    return plain.last_rows_attention(q, k, v) if found is None else found


def merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """See `torch.attention.merge`. In memory the output is [T, H, G, D]. More than two parts are
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
    _merge[(-(-rows // _ROWS), heads * group)](
        a,
        b,
        a_lse.contiguous(),
        b_lse.contiguous(),
        out,
        lse,
        *(row_stride(a, dim) for dim in (0, 1, 2)),
        *(row_stride(b, dim) for dim in (0, 1, 2)),
        group,
        rows,
        D=size,
        DP=power(size),
        BT=_ROWS,
        num_warps=4,
    )
    return out.permute(1, 2, 0, 3), lse


def variants() -> list[Variant]:
    """Builds for the compile gate."""
    found = []
    for size, kind, last in ((128, "bf16", "bf16"), (80, "fp16", "fp32"), (128, "fp32", "fp32")):
        kinds = {"a": f"*{kind}", "b": f"*{kind}", "out": f"*{last}"}
        kinds |= dict.fromkeys(("a_lse", "b_lse", "lse"), "*fp32")
        constants: dict[str, object] = {"D": size, "DP": power(size), "BT": _ROWS}
        found.append(
            Variant(
                f"merge-{kind}-{last}-d{size}",
                _merge,
                typed(_merge, kinds, constants),
                constants,
                reads={"a": WIDE, "b": WIDE},
            )
        )
    for size, kind, group, lines, window in _BUILDS:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[kind]
        tile = _tile(dtype, size, lines)
        kinds = dict.fromkeys(("q", "k", "v"), f"*{kind}") | {"q_pos": "*i64", "k_pos": "*i64"}
        kinds |= {"lse": "*fp32", "outs": f"*{kind}" if lines > 1024 else "*fp32"}
        constants = {
            "G": group,
            "D": size,
            "DP": width(size),
            "BM": tile.left,
            "BN": tile.right,
            "WINDOW": window,
            "UPCAST": False,
            "STAGES": tile.stages,
        }
        found.append(
            Variant(
                f"visible-{kind}-d{size}-g{group}-lines{lines}" + "-window" * window,
                _visible,
                typed(_visible, kinds, constants),
                constants,
                tile.warps,
                tile.stages,
                mma=kind != "fp32",
                reads={"q": WIDE, "k": WIDE, "v": WIDE},
            )
        )
    for size, kind in ((128, "bf16"), (80, "fp32")):
        kinds = dict.fromkeys(("outs", "lse", "whole"), "*fp32") | {"out": f"*{kind}"}
        constants = {"D": size, "DP": power(size), "BT": _ROWS}
        signature = typed(_joined, kinds, constants)
        name = f"joined-{kind}-d{size}"
        found.append(Variant(name, _joined, signature, constants, reads={"outs": WIDE}))
    return found


_BUILDS = [
    (128, "bf16", 4, 1024, False),
    (128, "bf16", 4, 64, False),
    (128, "fp16", 1, 4096, True),
    (80, "bf16", 1, 16, False),
    (256, "bf16", 2, 512, False),
    (128, "fp32", 4, 1024, False),
]
"""Head size, dtype, G, queries of all heads of a group, sliding window."""
