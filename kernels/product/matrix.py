"""`Matrix`: the tensors of a matrix, as kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Matrix:
    """Weights [outs, n] in memory: plain; int8 with bfloat16 scales [outs]; or four bits.

    Plain is bfloat16, on a GPU also float16. Four bits are packed uint8: on a CPU [N, n / 2] with
    bfloat16 scales [n / group, N, 2], where `cpu.int4_product` says what N is; on a GPU [outs,
    n / 2] with scales [n / group, outs, 2], as in models/linear.py. bias: [outs] or None. half:
    half the rows of a tile of four bits on a CPU, otherwise 0.
    """

    outs: int
    n: int
    weights: Tensor
    scales: Tensor | None = None
    bias: Tensor | None = None
    half: int = 0
