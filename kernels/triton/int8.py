"""Keys and values in int8, in Triton. Specification: `torch/int8.py`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.triton.tiles import in_rows, power, row_stride, typed
from minikv.kernels.triton.variants import WIDE, Variant

_NUMBERS = 4096  # of rows, in one program


@triton.jit
def quantized(x, AXIS: tl.constexpr = 0):
    """A row as int8, and its scale; with AXIS 1 the rows [N, D], and their scales [N]."""
    x = x.to(tl.float32)
    most = tl.max(tl.abs(x), AXIS)
    scale = tl.where(most == 0, 1.0, tl.div_rn(most, 127.0))
    scale = tl.where(tl.max((x != x).to(tl.int32), AXIS) > 0, float("nan"), scale)
    if AXIS == 1:
        step = scale[:, None]
    else:
        step = scale
    code = tl.div_rn(x, step) + 12582912.0  # 1.5 * 2^23: rounds to a whole number, half to even
    return tl.minimum(tl.maximum(code - 12582912.0, -127.0), 127.0), scale


@triton.jit(do_not_specialize=["x_head", "x_row", "rows"])
def _to_codes(
    x, codes, scales, x_head, x_row, rows, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr
):
    h = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    d = tl.arange(0, DP)
    inside = j < rows
    mine = inside[:, None] & (d < D)[None, :]
    line = h * x_head + j.to(tl.int64) * x_row
    code, scale = quantized(tl.load(x + line[:, None] * D + d[None, :], mask=mine, other=0.0), 1)
    line = h * rows + j
    tl.store(codes + line[:, None] * D + d[None, :], code.to(tl.int8), mask=mine)
    tl.store(scales + line, scale, mask=inside)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["index"])
def _codes_at(codes, scales, index, out, rows, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr):
    j = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    d = tl.arange(0, DP)
    inside = j < rows
    mine = inside[:, None] & (d < D)[None, :]
    row = tl.load(index + j, mask=inside, other=0)
    code = tl.load(codes + row[:, None] * D + d[None, :], mask=mine, other=0)
    number = code.to(tl.float32) * tl.load(scales + row, mask=inside, other=0.0)[:, None]
    there = out + j[:, None] * D + d[None, :]
    tl.store(there, number.to(out.dtype.element_ty), mask=mine)


def to_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `torch.int8.to_codes`; x [H, N, D] or [N, D]."""
    rows = in_rows(x if x.dim() == 3 else x[None])
    heads, count, size = rows.shape
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    block = _NUMBERS // power(size)
    strides = row_stride(rows, 0), row_stride(rows, 1)
    _to_codes[(max(1, -(-count // block)), heads)](
        rows, codes, scale, *strides, count, D=size, DP=power(size), BN=block
    )
    return codes, scale


def codes_at(codes: Tensor, scale: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """See `torch.int8.codes_at`."""
    assert codes.is_contiguous()
    assert scale.is_contiguous()
    index, size = index.contiguous(), codes.shape[1]
    out = torch.empty((*index.shape, size), dtype=dtype, device=codes.device)
    block = _NUMBERS // power(size)
    grid = (max(1, -(-index.numel() // block)),)
    _codes_at[grid](codes, scale, index, out, index.numel(), D=size, DP=power(size), BN=block)
    return out


def variants() -> list[Variant]:
    """Builds for the compile gate."""
    found = []
    for size, kind in ((128, "bf16"), (80, "fp16"), (256, "bf16"), (128, "fp32")):
        constants: dict[str, object] = {
            "D": size,
            "DP": power(size),
            "BN": _NUMBERS // power(size),
        }
        numbers = {"x": f"*{kind}", "out": f"*{kind}"}
        kinds = numbers | {"codes": "*i8", "scales": "*fp32", "index": "*i64"}
        for name, fn, read in (("to-codes", _to_codes, "x"), ("codes-at", _codes_at, "codes")):
            signature = typed(fn, kinds, constants)
            build = f"{name}-{kind}-d{size}"
            wide = {read: WIDE}
            found.append(Variant(build, fn, signature, constants, reads=wide))
    return found
