"""How unlike a key is to the others of its head, in Triton. Specification: `torch/distances.py`.

The first launch adds the keys of length 1 in `_PARTS` parts, the second adds the parts in a fixed
order and compares. Keys of length 1 are not stored.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.triton.tiles import head_stride, in_rows, power, row_stride, typed
from minikv.kernels.triton.variants import WIDE, Variant

_PARTS, _TOGETHER = 64, 16  # of the sum over a head; how many a program reads at once
_NUMBERS = 4096  # of keys, in one program or one round of it
_INTEGERS = ["k_head", "k_row", "pos_head", "rows"]


@triton.jit
def _units(key, pos, h, j, k_head, k_row, pos_head, rows, D: tl.constexpr, DP: tl.constexpr):
    """Rows j of a head with length 1 [BN, DP]; 0 where there is no row."""
    d = tl.arange(0, DP)
    live = tl.load(pos + h * pos_head + j, mask=j < rows, other=-1) >= 0
    line = h * k_head + j.to(tl.int64) * k_row
    there = line[:, None] * D + d[None, :]
    x = tl.load(key + there, mask=live[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    length = tl.sqrt_rn(tl.sum(x * x, 1))
    return tl.div_rn(x, tl.maximum(length, 1e-12)[:, None])


@triton.jit(do_not_specialize=[*_INTEGERS, "span"], do_not_specialize_on_alignment=["pos"])
def _unit_sums(
    key,
    pos,
    sums,
    k_head,
    k_row,
    pos_head,
    rows,
    span,
    D: tl.constexpr,
    DP: tl.constexpr,
    BN: tl.constexpr,
):
    """Grid (parts, H): the sum of `span` keys of length 1."""
    h = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0)
    total = tl.zeros((DP,), tl.float32)
    for s in tl.range(part * span, tl.minimum((part + 1) * span, rows), BN):
        j = s + tl.arange(0, BN)
        total += tl.sum(_units(key, pos, h, j, k_head, k_row, pos_head, rows, D, DP), 0)
    tl.store(sums + (h * tl.num_programs(0) + part) * DP + tl.arange(0, DP), total)


@triton.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=["pos"])
def _key_distances(
    key,
    pos,
    sums,
    out,
    k_head,
    k_row,
    pos_head,
    rows,
    D: tl.constexpr,
    DP: tl.constexpr,
    BN: tl.constexpr,
    PARTS: tl.constexpr,
    BP: tl.constexpr,
):
    h = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    d = tl.arange(0, DP)
    mean = tl.zeros((DP,), tl.float32)
    for s in tl.range(0, PARTS, BP):
        part = h * PARTS + s + tl.arange(0, BP)
        mean += tl.sum(tl.load(sums + part[:, None] * DP + d[None, :]), 0)
    mean = tl.div_rn(mean, tl.maximum(tl.sqrt_rn(tl.sum(mean * mean, 0)), 1e-12))
    unit = _units(key, pos, h, j, k_head, k_row, pos_head, rows, D, DP)
    tl.store(out + h * rows + j, -tl.sum(unit * mean[None, :], 1), mask=j < rows)


def key_distances(key: Tensor, pos: Tensor) -> Tensor:
    """See `torch.distances.key_distances`."""
    key, pos = in_rows(key), pos if pos.stride(-1) == 1 else pos.contiguous()
    heads, rows, size = key.shape
    wide, block = power(size), _block(size)
    sums = torch.empty((heads, _PARTS, wide), dtype=torch.float32, device=key.device)
    out = torch.empty((heads, rows), dtype=torch.float32, device=key.device)
    numbers = row_stride(key, 0), row_stride(key, 1), head_stride(pos), rows
    span = -(-rows // (_PARTS * block)) * block
    _unit_sums[(_PARTS, heads)](key, pos, sums, *numbers, span, D=size, DP=wide, BN=block)
    _key_distances[(max(1, -(-rows // block)), heads)](
        key, pos, sums, out, *numbers, D=size, DP=wide, BN=block, PARTS=_PARTS, BP=_TOGETHER
    )
    return out


def _block(size: int) -> int:
    """Keys of `size` in one program or one round of it."""
    return _NUMBERS // power(size)


def variants() -> list[Variant]:
    """Builds for the compile gate."""
    found = []
    for size, kind in ((128, "bf16"), (80, "fp16"), (256, "bf16"), (128, "fp32")):
        kinds = {"key": f"*{kind}", "pos": "*i64", "sums": "*fp32", "out": "*fp32"}
        one: dict[str, object] = {"D": size, "DP": power(size), "BN": _block(size)}
        for fn, constants in (
            (_unit_sums, one),
            (_key_distances, one | {"PARTS": _PARTS, "BP": _TOGETHER}),
        ):
            signature = typed(fn, kinds, constants)
            name = f"{fn.__name__.strip('_').replace('_', '-')}-{kind}-d{size}"
            found.append(Variant(name, fn, signature, constants, reads={"key": WIDE}))
    return found
