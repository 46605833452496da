"""The mean of scores over the heads that hold a position (TOVA, arXiv 2401.06104)."""

from __future__ import annotations

import torch
from torch import Tensor


def heads_mean(values: Tensor, pos: Tensor, end: int) -> Tensor:
    """float32 [H, N]: the mean of `values` float32 over the heads of a layer that hold a row of the
    same position.

    pos int64 [H, N], below `end`; -1 for no row, where the result has no meaning.
    """
    place = pos + 1
    sums = torch.zeros(end + 1, dtype=torch.float64, device=values.device)
    counts = torch.zeros_like(sums)
    for at, row in zip(place, values.to(torch.float64), strict=True):  # a fixed order of addition
        sums.scatter_add_(0, at, row)
        counts.scatter_add_(0, at, torch.ones_like(row))
    return (sums[place] / counts[place]).to(values.dtype)
