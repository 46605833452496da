"""Random numbers by counting: the same on every device, in any order, and without any state.

Every draw is keyed by what it is for (seed, layer, head, step, position), so that no draw depends
on how many came before it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def uniform(seed: int, *keys: Tensor | int) -> Tensor:
    """float32 in (0, 1) for every entry of the broadcast int64 `keys` (one tensor at least).

    A chain of splitmix64 rounds (Steele, Lea and Flood, OOPSLA 2014) over the seed and the keys.
    """
    state: Tensor | int = seed
    for key in keys:
        state = _mix(torch.as_tensor(state) ^ _mix(torch.as_tensor(key)))
    assert isinstance(state, Tensor), "a draw needs a key"
    # 23 bits and a half are exact in float32; with 24 the largest draw would be rounded to 1.
    return (_shift(state, 41).to(torch.float32) + 0.5) / (1 << 23)


def gumbel(seed: int, *keys: Tensor | int) -> Tensor:
    """Standard Gumbel numbers, keyed as in `uniform`: a top-k of log p + gumbel draws k entries
    without replacement with probabilities p."""
    return -(-uniform(seed, *keys).log()).log()


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = x.to(torch.int64) + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _signed(x: int) -> int:
    """The int64 with the bits of x, the highest of which is set."""
    return x - (1 << 64)
