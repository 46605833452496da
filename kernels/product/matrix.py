"""`Matrix`: the tensors of a matrix, in the form for kernels. `BLOCKS`: the formats of a file."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

PLAIN, FOUR_BITS = 30, (2, 3, 12)
BLOCKS = {2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 12: (256, 144)}
BLOCKS |= {13: (256, 176), 14: (256, 210), 20: (32, 18), PLAIN: (1, 2)}
"""The weights of a block and its bytes, by the number of the type in GGUF. Four bits are in groups
of 32 with a scale and an offset. PLAIN: bfloat16."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Weights [outs, n] in memory: plain; int8 with bfloat16 scales [outs]; or four bits.

    Plain is bfloat16, on a GPU also float16. Four bits are packed uint8: on a CPU [N, n / 2] with
    bfloat16 scales [n / group, N, 2], N as in `cpu.int4_product`; on a GPU [outs,
    n / 2] with scales [n / group, outs, 2], as in models/linear.py. bias: [outs] or None. half:
    half the rows of a tile of four bits on a CPU, otherwise 0.
    """

    outs: int
    n: int
    weights: Tensor
    scales: Tensor | None = None
    bias: Tensor | None = None
    half: int = 0
