"""Integer products of packed weights and activations that are rounded to eight bits.

The activations of a row are rounded a block of columns at a time: the largest magnitude of a block
becomes 127. The products of a block are summed as integers, so without error. The sum is multiplied
by the scale of the activations in float32 and added to that of the other blocks. A row does not
depend on other rows, so a prompt may be read in parts of any size. A block with infinity or NaN
makes its row NaN.

These functions are the specification. They are slow: without a faster kernel, `models/linear.py`
does not round activations.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.kernels.int8 import to_codes

BLOCK = 32
"""Columns whose activations share a scale. A large activation makes the others of its block less
exact, so blocks are small."""


def rounded(x: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """x [t, n] -> codes float32 [t, blocks, block], whole numbers, and scale float32 [t, blocks].

    Columns beyond n are 0.
    """
    parts = F.pad(x, (0, -x.shape[1] % block)).view(x.shape[0], -1, block)
    finite = parts.isfinite().all(-1)
    codes, scale = to_codes(torch.where(finite[..., None], parts, 0))
    return codes.float(), torch.where(finite, scale, torch.nan)


def int8_product(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """x bfloat16 [t, n] times the transpose of scale [m] * codes int8 [m, n]: bfloat16 [t, m]."""
    a, steps = rounded(x)
    w = F.pad(codes, (0, -x.shape[1] % BLOCK)).view(len(codes), a.shape[1], BLOCK).float()
    sums = torch.einsum("tbi,mbi->tbm", a, w)  # whole numbers below 2^24
    return ((steps[..., None] * sums).sum(1) * scale.float()).to(x.dtype)


def int4_product(x: Tensor, packed: Tensor, scales: Tensor, half: int, outs: int) -> Tensor:
    """x bfloat16 [t, n] times the transpose of weights [outs, n] of four bits: bfloat16 [t, outs].

    packed uint8 [rows, n / 2]; rows: outs, rounded up to whole tiles of 2 * half rows. In a tile,
    byte i of a column has row i in its lower four bits and row half + i in the upper ones. scales
    bfloat16 [n / group, rows, 2]: the step and the middle of each group of columns. A weight is
    (code - 8) * step + middle.
    """
    groups, padded, _ = scales.shape
    columns = x.shape[1]
    a, steps = rounded(x)
    tiles = packed.view(padded // (2 * half), columns, half)
    codes = torch.cat((tiles & 15, tiles >> 4), 2).transpose(1, 2).reshape(padded, -1, BLOCK)
    sums = torch.einsum("tbi,mbi->tbm", a, codes.float() - 8)  # whole numbers below 2^24
    step, middle = scales.float().repeat_interleave(sums.shape[1] // groups, 0).unbind(-1)
    total = steps[..., None] * (sums * step + a.sum(-1, keepdim=True) * middle)
    return total.sum(1)[:, :outs].to(x.dtype)
