"""The mean of scores over the heads that hold a position, in Triton.

The first launch notes for each head where the row of a position lies, the second reads there, and
checks that the row has the position: nothing is noted for positions that a head does not hold. So
the order of addition is that of the heads. Specification: `torch/heads_mean.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.triton.tiles import head_stride, typed
from minikv.kernels.triton.variants import Variant

_BLOCK = 256


@triton.jit(
    do_not_specialize=["pos_head", "rows", "end"], do_not_specialize_on_alignment=["pos", "place"]
)
def _place_rows(pos, place, pos_head, rows, end, BN: tl.constexpr):
    h = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    at = tl.load(pos + h * pos_head + j, mask=j < rows, other=-1)
    tl.store(place + h * end + at, j, mask=at >= 0)


@triton.jit(
    do_not_specialize=["values_head", "pos_head", "rows", "end"],
    do_not_specialize_on_alignment=["values", "pos", "place"],
)
def _heads_mean(
    values,
    pos,
    place,
    out,
    values_head,
    pos_head,
    rows,
    end,
    BN: tl.constexpr,
):
    h = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    at = tl.load(pos + h * pos_head + j, mask=j < rows, other=-1)
    total = tl.zeros((BN,), tl.float64)
    count = tl.zeros((BN,), tl.float64)
    for other in tl.range(0, tl.num_programs(1)):
        head = tl.cast(other, tl.int64)
        row = tl.load(place + head * end + at, mask=at >= 0, other=-1)
        held = (row >= 0) & (row < rows)
        held = held & (tl.load(pos + head * pos_head + row, mask=held, other=-2) == at)
        value = tl.load(values + head * values_head + row, mask=held, other=0.0)
        total += value.to(tl.float64)
        count += held.to(tl.float64)
    mean = total / tl.maximum(count, 1.0)
    tl.store(out + h * rows + j, mean.to(tl.float32), mask=j < rows)


def heads_mean(values: Tensor, pos: Tensor, end: int) -> Tensor:
    """See `torch.heads_mean.heads_mean`."""
    values, pos = (t if t.stride(-1) == 1 else t.contiguous() for t in (values, pos))
    heads, rows = pos.shape
    place = torch.empty((heads, end), dtype=torch.int32, device=pos.device)
    out = torch.empty((heads, rows), dtype=torch.float32, device=pos.device)
    of_values, of_pos = (head_stride(t) for t in (values, pos))
    grid = max(1, -(-rows // _BLOCK)), heads
    _place_rows[grid](pos, place, of_pos, rows, end, BN=_BLOCK)
    _heads_mean[grid](values, pos, place, out, of_values, of_pos, rows, end, BN=_BLOCK)
    return out


def variants() -> list[Variant]:
    """Builds for the compile gate."""
    constants: dict[str, object] = {"BN": _BLOCK}
    kinds = {"values": "*fp32", "pos": "*i64", "place": "*i32", "out": "*fp32"}
    return [
        Variant(name, fn, typed(fn, kinds, constants), constants)
        for name, fn in (("place-rows", _place_rows), ("heads-mean", _heads_mean))
    ]
