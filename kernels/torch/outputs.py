"""The norms of values after the output projection (CriticalKV, arXiv 2502.03805, algorithm 1)."""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS = 4096  # rows projected at once


def output_norms(value: Tensor, output: Tensor) -> Tensor:
    """float32 [H, N]: the L1 norm |v W|_1 of each value v [H, N, D] after the output projection W
    [H, G, D, hidden], mean over G."""
    norms = torch.zeros(value.shape[:2], device=value.device)
    for h in range(len(value)):
        for lo in range(0, value.shape[1], _ROWS):
            rows = value[h, lo : lo + _ROWS].float()
            for one in output[h]:  # [D, hidden]
                norms[h, lo : lo + _ROWS] += (rows @ one.float()).abs().sum(-1)
    return norms / output.shape[1]
