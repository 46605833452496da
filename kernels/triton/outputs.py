"""The norms of values after the output projection, in Triton. The projected values are not stored;
for Euclidean ones a product of the projection with itself is, which has no more numbers than it.

Specification: `torch/outputs.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.torch import outputs as plain_torch
from minikv.kernels.triton.quadratic import PART, quadratic, quadratic_tile
from minikv.kernels.triton.tiles import Tile, in_rows, row_stride, typed, upcast, width
from minikv.kernels.triton.variants import WIDE, Variant

_WEIGHTS = 1 << 25  # numbers of a projection that are multiplied at once, in float32
_INTEGERS = ["v_head", "v_row", "w_head", "w_group", "w_row", "rows", "hidden"]


@triton.jit(do_not_specialize=_INTEGERS)
def _norms(
    value,
    weight,
    out,
    v_head,
    v_row,
    w_head,
    w_group,
    w_row,
    rows,
    hidden,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
):
    h = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, DP)
    line = h * v_head + i.to(tl.int64) * v_row
    mine = tl.load(
        value + line[:, None] * D + d[None, :],
        mask=(i < rows)[:, None] & (d < D)[None, :],
        other=0.0,
    )
    if UPCAST:
        mine = mine.to(tl.float32)
    tiles = tl.cdiv(hidden, BN)
    total = tl.zeros((BM,), tl.float32)
    for step in tl.range(0, G * tiles, num_stages=STAGES):
        j = step % tiles * BN + tl.arange(0, BN)
        column = h * w_head + (step // tiles) * w_group + j.to(tl.int64) * w_row
        w = tl.load(
            weight + column[None, :] * D + d[:, None],
            mask=(j < hidden)[None, :] & (d < D)[:, None],
            other=0.0,
        )
        if UPCAST:
            w = w.to(tl.float32)
        total += tl.sum(tl.abs(tl.dot(mine, w, input_precision="ieee")), 1)
    tl.store(out + h * rows + i, total / G, mask=i < rows)


@triton.jit(do_not_specialize=["v_head", "v_row", "rows"])
def _lengths(
    value,
    gram,
    out,
    v_head,
    v_row,
    rows,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    h = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, DP)
    real = i < rows
    line = (h * v_head + i.to(tl.int64) * v_row)[:, None] * D
    mine = tl.load(value + line + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)
    mine = mine.to(tl.float32)
    for g in tl.range(0, G):
        head = h * G + g
        square = quadratic(mine, value, line, real, gram + head * (D * D), D, DP, BM, BK)
        # A NaN stays one, as in torch.
        square = tl.maximum(square, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(out + head * rows + i, tl.sqrt_rn(square), mask=real)


def _tile(dtype: torch.dtype, size: int) -> Tile:
    """How many values and how many columns of the projection one product has."""
    wide = width(size)
    if dtype == torch.float32:  # no matrix instruction takes float32 unrounded
        return Tile(32, 32, 8, 1) if wide <= 128 else Tile(16, 16, 4, 1)
    return Tile(64, 32, 4, 2) if wide > 128 else Tile(128, 64, 8, 3)


def output_norms(value: Tensor, output: Tensor) -> Tensor:
    """See `torch.outputs.output_norms`."""
    if value.dtype != output.dtype:
        return plain_torch.output_norms(value, output)
    value, weight = in_rows(value), in_rows(output.transpose(2, 3))
    heads, rows, size = value.shape
    _, group, hidden, _ = weight.shape
    tile = _tile(value.dtype, size)
    out = torch.empty((heads, rows), dtype=torch.float32, device=value.device)
    _norms[(max(1, -(-rows // tile.left)), heads)](
        value,
        weight,
        out,
        *(row_stride(value, dim) for dim in (0, 1)),
        *(row_stride(weight, dim) for dim in (0, 1, 2)),
        rows,
        hidden,
        G=group,
        D=size,
        DP=width(size),
        BM=tile.left,
        BN=tile.right,
        UPCAST=upcast(value.dtype),
        STAGES=tile.stages,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def output_lengths(value: Tensor, output: Tensor, most: int = 0) -> Tensor:
    """See `torch.outputs.output_lengths`. `most` is not used: here it is `_WEIGHTS`."""
    value = in_rows(value)
    heads, rows, size = value.shape
    group, tile = output.shape[1], quadratic_tile(size)
    step = max(1, _WEIGHTS // output[0].numel())
    grams = []
    for lo in range(0, heads, step):
        weights = output[lo : lo + step].float()
        grams.append(weights @ weights.transpose(2, 3))  # |v W|^2 = v (W W^T) v^T
    gram = grams[0] if len(grams) == 1 else torch.cat(grams)
    out = torch.empty((heads, group, rows), dtype=torch.float32, device=value.device)
    _lengths[(max(1, -(-rows // tile.left)), heads)](
        value,
        gram.contiguous(),
        out,
        *(row_stride(value, dim) for dim in (0, 1)),
        rows,
        G=group,
        D=size,
        DP=width(size),
        BM=tile.left,
        BK=tile.right,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def variants() -> list[Variant]:
    """Builds for the compile gate."""
    found = []
    for size, kind, group in ((128, "bf16", 4), (256, "bf16", 2), (128, "fp32", 1)):
        tile = quadratic_tile(size)
        kinds = {"value": f"*{kind}", "gram": "*fp32", "out": "*fp32"}
        lengths: dict[str, object] = {
            "G": group,
            "D": size,
            "DP": width(size),
            "BM": tile.left,
            "BK": tile.right,
        }
        found.append(
            Variant(
                f"lengths-{kind}-d{size}",
                _lengths,
                typed(_lengths, kinds, lengths),
                lengths,
                tile.warps,
                tile.stages,
                reads={"value": PART, "gram": WIDE},
            )
        )
    for size, kind, group in ((128, "bf16", 4), (80, "fp16", 1), (128, "fp32", 4)):
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[kind]
        tile = _tile(dtype, size)
        kinds = {"value": f"*{kind}", "weight": f"*{kind}", "out": "*fp32"}
        constants: dict[str, object] = {
            "G": group,
            "D": size,
            "DP": width(size),
            "BM": tile.left,
            "BN": tile.right,
            "UPCAST": False,
            "STAGES": tile.stages,
        }
        found.append(
            Variant(
                f"norms-{kind}-d{size}",
                _norms,
                typed(_norms, kinds, constants),
                constants,
                tile.warps,
                tile.stages,
                mma=kind != "fp32",
                reads={"value": WIDE, "weight": WIDE},
            )
        )
    return found
