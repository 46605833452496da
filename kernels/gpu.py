"""The common parts of the Triton kernels: sizes of tiles, strides in rows, int8 rows, and the
interpreter's limits."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of the left and of the right factor of a product, and warps and stages of the launch."""

    left: int
    right: int
    warps: int
    stages: int


def power(count: int) -> int:
    """The power of two at or above `count`."""
    return 1 << max(0, count - 1).bit_length()


def width(size: int) -> int:
    """Columns of a tile for heads of `size`: a power of two that a matrix product allows."""
    return max(16, power(size))


def attention_tile(dtype: torch.dtype, size: int, lines: int) -> Tile:
    """How many queries (of all heads of a group) and keys one product of attention has."""
    wide = width(size)
    if dtype == torch.float32:  # matrix instructions would round float32
        return Tile(32, 32, 8, 1) if wide <= 64 else Tile(16, 16, 4 if wide <= 128 else 8, 1)
    if wide > 128:
        return Tile(min(64, max(16, power(lines))), 32, 8 if lines > 32 else 4, 2)
    few = lines <= 64
    return Tile(max(16, power(lines)) if few else 128, 64, 4 if few else 8, 3)


def upcast(dtype: torch.dtype) -> bool:
    """Whether to multiply in float32: Triton's interpreter multiplies bfloat16 as integers."""
    return bool(triton.knobs.runtime.interpret) and dtype == torch.bfloat16


def compiled_for(q: Tensor, tile: Tile) -> dict[str, Any]:
    """The constants of every kernel that multiplies queries [H, G, T, D] and keys."""
    group, _, size = q.shape[1:]
    how = {"UPCAST": upcast(q.dtype), "num_warps": tile.warps, "num_stages": tile.stages}
    return {"G": group, "D": size, "DP": width(size), **how}


def in_rows(t: Tensor) -> Tensor:
    """`t` [..., D]; a copy if a stride is not a multiple of D or if it is not aligned to 16 bytes.

    Strides are then counted in rows. So the compiler knows that every row is aligned to 16 bytes if
    the size of a row is a multiple of 16 bytes.
    """
    size = t.shape[-1]
    whole = all(s % size == 0 for s, n in zip(t.stride()[:-1], t.shape[:-1], strict=True) if n > 1)
    if t.stride(-1) == 1 and whole and t.data_ptr() % 16 == 0:
        return t
    return t.contiguous()


def lines(t: Tensor) -> Tensor:
    """`t` [..., N], copied if its last dimension is not contiguous."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def head_stride(t: Tensor) -> int:
    """The stride between heads of `t` [H, ...]; 0 for one head."""
    return 0 if len(t) == 1 else t.stride(0)


def row_stride(t: Tensor, dim: int) -> int:
    """A stride of `in_rows(t)` in rows; 0 for a dimension of size 1."""
    return 0 if t.shape[dim] <= 1 else t.stride(dim) // t.shape[-1]


@triton.jit
def quantized(x):
    """A row as int8, and its scale."""
    x = x.to(tl.float32)
    most = tl.max(tl.abs(x), 0)
    scale = tl.where(most == 0, 1.0, tl.div_rn(most, 127.0))
    scale = tl.where(tl.max((x != x).to(tl.int32), 0) > 0, float("nan"), scale)
    code = tl.div_rn(x, scale) + 12582912.0  # 1.5 * 2^23: rounds to a whole number, half to even
    return tl.minimum(tl.maximum(code - 12582912.0, -127.0), 127.0), scale
