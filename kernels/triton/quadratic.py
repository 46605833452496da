"""What the kernels share that compute x M x for rows x and a square matrix M, in float32."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from minikv.kernels.triton.tiles import Tile, width


@triton.jit
def quadratic(
    x,
    source,
    line,
    real,
    matrix,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """float32 [BM]: x M x of the rows float32 [BM, DP], which are at source + line [BM, 1]. Of
    these the ones in `real` are read again, in parts. matrix: M float32 [D, D], by rows."""
    d = tl.arange(0, DP)
    product = tl.zeros((BM, DP), tl.float32)
    for s in tl.range(0, D, BK):
        c = s + tl.arange(0, BK)
        inside = c < D
        part = tl.load(source + line + c[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        rows = tl.load(
            matrix + c[:, None] * D + d[None, :],
            mask=inside[:, None] & (d < D)[None, :],
            other=0.0,
        )
        product = tl.dot(part.to(tl.float32), rows, product, input_precision="ieee")
    return tl.sum(product * x, 1)


def quadratic_tile(size: int) -> Tile:
    """How many rows, and how many of their numbers, one product has. No matrix instruction takes
    float32 unrounded."""
    return Tile(64, 16, 8, 1) if width(size) <= 128 else Tile(16, 16, 4, 1)


PART = 4
"""Bytes that a thread reads of a part, which is in a cache: the rows were read before."""
