"""Matrix products of one row, for a decode step."""

from __future__ import annotations

import torch
from torch import Tensor


def row_product(x: Tensor, weight: Tensor) -> Tensor:
    """One row x [1, n] times the transpose of weight [m, n]: [1, m] in their dtype."""
    return torch.mm(x, weight.t())
