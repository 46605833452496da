"""Bits of integers: 32 in each word of 64, as torch has no unsigned ones."""

from __future__ import annotations

from torch import Tensor

BITS = 32
"""Bits of a word."""


def ones(word: Tensor) -> Tensor:
    """int64: how many of the 32 bits of each int64 are set."""
    x = word - ((word >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24) & 0xFF
