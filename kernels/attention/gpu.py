"""Joining attention over disjoint sets of rows, in Triton: one launch for two sets and all heads.
Attention itself is torch's, or cuDNN's where that is faster."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.attention import cudnn, plain
from minikv.kernels.gpu import in_rows, power, row_stride

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
