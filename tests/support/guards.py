"""Tensors between absurd numbers: what is read or written beside them is noticed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

EDGE = 16 * 64  # numbers on each side; tensors begin at 16 bytes


def absurd(dtype: torch.dtype) -> float:
    """NaN, or an integer that nothing should meet; True for bool."""
    if dtype == torch.bool:
        return True
    return math.nan if dtype.is_floating_point else torch.iinfo(dtype).max // 2


def guarded(t: Tensor, device: str = "cpu") -> Tensor:
    """A contiguous copy on the device between absurd numbers."""
    memory = torch.full((t.numel() + 2 * EDGE,), absurd(t.dtype), dtype=t.dtype, device=device)
    return memory[EDGE : EDGE + t.numel()].view(t.shape).copy_(t)


def untouched(t: Tensor) -> bool:
    """Whether what `guarded` put around a tensor is still there."""
    memory = torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage())
    around = torch.cat((memory[:EDGE], memory[EDGE + t.numel() :]))
    return bool((around != around).all() if t.is_floating_point() else (around == around[0]).all())
