"""Rows in int8, as the kernels that append them write them. Specification: `torch/int8.py`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


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
