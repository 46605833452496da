"""The small operators of a layer, in Triton, one launch each.

Results are rounded where torch's operators round them. Specification: `plain.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.gpu import in_rows, power, row_stride
from minikv.kernels.layer import plain as plain_torch

_MAX_ROW = 16384  # the longest row that one program can hold
_HEADS = 8  # heads that one program rotates
_PART = 1024  # numbers of a row that one program multiplies


@triton.jit
def rounded(x, like):
    """float32 x, rounded to the dtype of the pointer `like`."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _add_norm(x, y, weight, out, scale, N: tl.constexpr, NP: tl.constexpr, ADD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * N
    j = tl.arange(0, NP)
    ok = j < N
    here = tl.load(x + row + j, mask=ok, other=0.0).to(tl.float32)
    if ADD:
        here = rounded(here + tl.load(y + row + j, mask=ok, other=0.0).to(tl.float32), x)
        tl.store(x + row + j, here.to(x.dtype.element_ty), mask=ok)
    mean = tl.sum(here * here, 0) / N
    here = rounded(here * tl.rsqrt(mean + scale), x)
    by = tl.load(weight + j, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row + j, (here * by).to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["x_row", "heads"])
def _rotate(
    x,
    cos,
    sin,
    out,
    x_row,
    heads,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HP: tl.constexpr,
    BH: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    d = tl.arange(0, HP)
    inside = d < HALF
    ok = (h < heads)[:, None] & inside[None, :]
    at = h[:, None] * D + d[None, :]
    one = tl.load(x + t * x_row * D + at, mask=ok, other=0.0).to(tl.float32)
    two = tl.load(x + t * x_row * D + at + HALF, mask=ok, other=0.0).to(tl.float32)
    angle = t * D + d
    c1 = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    c2 = tl.load(cos + angle + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    s1 = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    s2 = tl.load(sin + angle + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    target = out + t * heads * D + at
    tl.store(target, (rounded(one * c1, x) + two * s1).to(out.dtype.element_ty), mask=ok)
    tl.store(target + HALF, (rounded(two * c2, x) + one * s2).to(out.dtype.element_ty), mask=ok)


@triton.jit
def _rotary_table(position, inverse, cos, sin, scale, HALF: tl.constexpr, HP: tl.constexpr):
    d = tl.arange(0, HP)
    ok = d < HALF
    angle = tl.load(position).to(tl.float32) * tl.load(inverse + d, mask=ok, other=0.0)
    c = (tl.cos(angle) * scale).to(cos.dtype.element_ty)
    s = tl.sin(angle) * scale
    tl.store(cos + d, c, mask=ok)
    tl.store(cos + HALF + d, c, mask=ok)
    tl.store(sin + d, (-s).to(sin.dtype.element_ty), mask=ok)
    tl.store(sin + HALF + d, s.to(sin.dtype.element_ty), mask=ok)


@triton.jit
def _silu_mul(both, N: tl.constexpr, BN: tl.constexpr):
    j = tl.program_id(1) * BN + tl.arange(0, BN)
    ok = j < N
    target = both + tl.program_id(0).to(tl.int64) * (2 * N) + j
    gate = tl.load(target, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(target + N, mask=ok, other=0.0).to(tl.float32)
    gate = rounded(gate / (1.0 + tl.exp(-gate)), both)
    tl.store(target, (gate * up).to(both.dtype.element_ty), mask=ok)


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """See `plain.add_norm`. Torch computes rows that are too long for a program."""
    rows, size = x.shape
    if size > _MAX_ROW:
        return plain_torch.add_norm(x, y, weight, eps)
    y = None if y is None else y.contiguous()
    assert x.is_contiguous()
    assert weight.is_contiguous()
    out = torch.empty_like(x)
    sizes = {"N": size, "NP": power(size), "ADD": y is not None}
    _add_norm[(rows,)](
        x, y, weight, out, eps, **sizes, num_warps=min(16, max(1, power(size) // 512))
    )
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `plain.rotate`."""
    rows, heads, size = x.shape
    if x.stride(1) != size:
        x = x.contiguous()
    x = in_rows(x)
    cos, sin = cos.contiguous(), sin.contiguous()
    out = x.new_empty(x.shape)
    sizes = {"D": size, "HALF": size // 2, "HP": power(size // 2), "BH": _HEADS}
    grid = rows, -(-heads // _HEADS)
    _rotate[grid](x, cos, sin, out, row_stride(x, 0), heads, **sizes, num_warps=2)
    return out


def rotary_table(
    position: Tensor, inverse: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `plain.rotary_table`."""
    half = len(inverse)
    cos, sin = (torch.empty((1, 1, 2 * half), dtype=dtype, device=inverse.device) for _ in range(2))
    _rotary_table[(1,)](position, inverse, cos, sin, scale, HALF=half, HP=power(half), num_warps=2)
    return cos, sin


def silu_mul(both: Tensor) -> Tensor:
    """See `plain.silu_mul`."""
    assert both.is_contiguous()
    size = both.shape[1] // 2
    _silu_mul[(len(both), -(-size // _PART))](both, N=size, BN=_PART, num_warps=4)
    return both[:, :size]
