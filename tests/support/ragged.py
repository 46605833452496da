"""Segments of an arena with unused rows between the heads."""

from __future__ import annotations

import torch
from torch import Tensor


def segments(lengths: list[int], gap: int = 3) -> tuple[Tensor, Tensor, int]:
    """start and length [H] of segments with unused rows between them, and R."""
    length = torch.tensor(lengths)
    start = (length + gap).cumsum(0) - length
    return start, length, int(start[-1] + length[-1]) + gap


def in_use(start: Tensor, length: Tensor, rows: int) -> Tensor:
    """Which rows are in use, bool [R]."""
    used = torch.zeros(rows, dtype=torch.bool)
    for a, n in zip(start.flatten().tolist(), length.flatten().tolist(), strict=True):
        used[a : a + n] = True
    return used
