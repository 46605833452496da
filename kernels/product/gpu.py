"""Unpacks weights of four bits, in Triton, in one launch: to the numbers that models/linear.py
defines. Products of many rows then read them."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_UNPACKED = 8  # rows of the weights that a program unpacks


@triton.jit
def _unpacked(steps, by, middle, like: tl.constexpr):
    """middle + (steps - 8) * by for steps 0 to 15, rounded once to bfloat16."""
    made = (steps.to(tl.float32) - 8.0) * by[:, None] + middle[:, None]
    return made.to(tl.bfloat16).to(like)


@triton.jit(do_not_specialize=["outputs"])
def _unpack_int4(
    packed, scales, out, outputs, N: tl.constexpr, GROUP: tl.constexpr, OUT: tl.constexpr
):
    n = tl.program_id(0) * OUT + tl.arange(0, OUT)
    g = tl.program_id(1)
    ok = n < outputs
    i = tl.arange(0, GROUP // 2)
    row = packed + n.to(tl.int64)[:, None] * (N // 2) + g * (GROUP // 2) + i[None, :]
    both = tl.load(row, mask=ok[:, None], other=0)
    pair = scales + (g.to(tl.int64) * outputs + n) * 2
    by = tl.load(pair, mask=ok, other=0.0).to(tl.float32)
    middle = tl.load(pair + 1, mask=ok, other=0.0).to(tl.float32)
    target = out + n.to(tl.int64)[:, None] * N + g * GROUP + i[None, :]
    kind: tl.constexpr = out.dtype.element_ty
    tl.store(target, _unpacked(both & 15, by, middle, kind), mask=ok[:, None])
    tl.store(target + GROUP // 2, _unpacked(both >> 4, by, middle, kind), mask=ok[:, None])


def unpack_int4_rows(packed: Tensor, scales: Tensor, out: Tensor) -> None:
    """packed uint8 [m, n / 2], scales bfloat16 [n / group, m, 2] -> out [m, n].

    The layout is that of models/linear.py.
    """
    outputs, half = packed.shape
    assert out.is_contiguous()
    sizes = {"N": 2 * half, "GROUP": 2 * half // len(scales), "OUT": _UNPACKED}
    grid = -(-outputs // _UNPACKED), len(scales)
    _unpack_int4[grid](packed, scales, out, outputs, **sizes, num_warps=4)
