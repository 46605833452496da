"""The matrices of a network: `Linear` is one of them, however its weights are kept."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear(Protocol):
    """x [t, in] -> x @ weight.T + bias, [t, out], in x's dtype."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """`out` [>= t, out] is room that the result may be written to, and then returned from."""
        ...

    def dense(self) -> Tensor:
        """The values [out, in] as they are multiplied: a view, or a new tensor."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes held, bias included."""
        ...


class Plain:
    """The weights as a checkpoint has them: what training, float32 and CUDA use."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Linear`."""
        if out is None:
            return F.linear(x, self.weight, self.bias)
        out = torch.mm(x, self.weight.t(), out=out[: x.shape[0]])
        return out if self.bias is None else out.add_(self.bias)

    def dense(self) -> Tensor:
        """See `Linear`; the weights themselves."""
        return self.weight

    @property
    def nbytes(self) -> int:
        """See `Linear`."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)
