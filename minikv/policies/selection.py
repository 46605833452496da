"""The arithmetic of choosing rows, as tensors: no value is read back from the device.

Functions that every prompt needs are kernels (`kernels/torch/selection.py`); policies call them
through `PromptView.ops`.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from minikv.kernels.torch.selection import (
    NOT_FREE,
    best,
    ensure_least,
    fill,
    order_key,
    pool,
    share,
    wanted,
)

__all__ = [
    "NOT_FREE",
    "best",
    "ensure_least",
    "exact",
    "fill",
    "order_key",
    "order_of",
    "pool",
    "ranked",
    "share",
    "tiered_key",
    "wanted",
]

_FINEST = 10**7  # denominators up to here leave room in 64 bits for 10^7 rows and 64 heads
_SURE, _PREFERRED = 0x7FFFFFFF << 32, 0x7FFFFFFE << 32  # above the key of every score


def order_of(pos: Tensor) -> Tensor:
    """int64 [H, N]: each head's rows by position, -1 first. pos int64 [H, N]."""
    return pos.sort(dim=1, stable=True).indices if pos.numel() else torch.empty_like(pos)


def ranked(scores: Tensor, pos: Tensor, free: Tensor) -> Tensor:
    """float32 [H, N] in (0, 1]: the share of the head's free rows that are no better than this row.

    It replaces scores of which only the order has a meaning. Of equal scores the younger row is
    better.
    """
    young = pos.argsort(dim=1, stable=True)
    order = young.gather(
        1, scores.masked_fill(~free, -torch.inf).gather(1, young).argsort(dim=1, stable=True)
    )
    places = torch.arange(1, pos.shape[1] + 1, device=pos.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, places)
    rank = rank - (~free).sum(1, keepdim=True)  # rows that are not free come first
    return (rank / free.sum(1, keepdim=True).clamp(min=1)).clamp(min=0.0)


def exact(alpha: float) -> Fraction:
    """The fraction that the decimal number denotes; with too many digits for 64-bit arithmetic, one
    less than 10^-7 away."""
    return Fraction(str(alpha)).limit_denominator(_FINEST)


def tiered_key(key: Tensor, pos: Tensor, sure: Tensor, preferred: Tensor | None) -> Tensor:
    """Raise the `order_key` int64 [H, N] of some rows: those that are `sure` to stay above all
    others, then those that are `preferred` above the rest; both bool [H, N]."""
    young = pos.clamp(min=0)
    if preferred is not None:
        key = torch.where(preferred, _PREFERRED | young, key)
    return torch.where(sure, _SURE | young, key)
