"""Counter-based random numbers, in Triton. Specification: `torch/counter_rng.py`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.triton.tiles import head_stride, typed
from minikv.kernels.triton.variants import Variant

_BLOCK = 1024
_MIX = tuple(
    tl.constexpr(number - (1 << 64))
    for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_STEP, _FIRST, _SECOND = _MIX


@triton.jit
def _shifted(x, bits: tl.constexpr):
    """Logical shift to the right of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@triton.jit
def _mixed(x):
    """One round of splitmix64."""
    x = x.to(tl.int64) + _STEP
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


@triton.jit
def chained(seed, layer, head, position):
    """The state after the keys that all rows of a head share."""
    state = _mixed(seed.to(tl.int64) ^ _mixed(layer))
    state = _mixed(state ^ _mixed(head))
    return _mixed(state ^ _mixed(position))


@triton.jit
def drawn(state, at):
    """The numbers of rows at positions `at`, float32 in (0, 1)."""
    bits = _shifted(_mixed(state ^ _mixed(at)), 41)
    return (bits.to(tl.float32) + 0.5) * (1.0 / (1 << 23))


@triton.jit(
    do_not_specialize=["seed", "layer", "position", "pos_head", "rows"],
    do_not_specialize_on_alignment=["pos"],
)
def _row_uniform(pos, out, seed, layer, position, pos_head, rows, BN: tl.constexpr):
    h = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = j < rows
    at = tl.load(pos + h * pos_head + j, mask=inside, other=0)
    tl.store(out + h * rows + j, drawn(chained(seed, layer, h, position), at), mask=inside)


def row_uniform(seed: int, layer: int, position: int, pos: Tensor) -> Tensor:
    """See `torch.counter_rng.row_uniform`."""
    pos = pos if pos.stride(-1) == 1 else pos.contiguous()
    heads, rows = pos.shape
    out = torch.empty((heads, rows), dtype=torch.float32, device=pos.device)
    numbers = seed, layer, position, head_stride(pos), rows
    _row_uniform[(max(1, -(-rows // _BLOCK)), heads)](pos, out, *numbers, BN=_BLOCK)
    return out


def variants() -> list[Variant]:
    """Builds for the compile gate."""
    constants: dict[str, object] = {"BN": _BLOCK}
    kinds = {"pos": "*i64", "out": "*fp32"}
    signature = typed(_row_uniform, kinds, constants)
    return [Variant("row-uniform", _row_uniform, signature, constants)]
