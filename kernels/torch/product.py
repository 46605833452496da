"""Matrix products of few rows, as a decode step has them."""

from __future__ import annotations

import torch
from torch import Tensor


def int8_product(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """x [t, n] times the transpose of scale [m] * codes int8 [m, n]: [t, m]; bfloat16, small t."""
    return torch._weight_int8pack_mm(x.contiguous(), codes, scale)


def row_product(x: Tensor, weight: Tensor) -> Tensor:
    """One row x [1, n] times the transpose of weight [m, n]: [1, m] in their dtype."""
    return torch.mm(x, weight.t())
