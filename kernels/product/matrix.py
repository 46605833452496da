"""The protocol `Matrix`: how models hand weights to kernels, which do not import models."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Matrix(Protocol):
    """Weights [outs, n] in memory: plain; int8 with bfloat16 scales [outs]; or four bits.

    Plain is bfloat16, on a GPU also float16. Four bits are packed uint8: on a CPU [N, n / 2] with
    bfloat16 scales [n / group, N, 2], where `torch.integer.int4_product` says what N is; on a GPU
    [outs, n / 2] with scales [n / group, outs, 2], as in models/linear_gpu.py. bias: [outs] or
    None. half: half the rows of a tile of four bits on a CPU, as in cpu/packing.py; otherwise 0.
    """

    @property
    def outs(self) -> int: ...
    @property
    def n(self) -> int: ...
    @property
    def weights(self) -> Tensor: ...
    @property
    def scales(self) -> Tensor | None: ...
    @property
    def bias(self) -> Tensor | None: ...
    @property
    def half(self) -> int: ...
