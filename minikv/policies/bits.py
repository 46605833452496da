"""Counting bits."""

from __future__ import annotations

from torch import Tensor


def ones(word: Tensor) -> Tensor:
    """int64: how many of the 64 bits of each int64 are set."""
    x = word - ((word >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((x * 0x0101010101010101) >> 56) & 0xFF
