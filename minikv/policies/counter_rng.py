"""Counter-based random numbers: the same on every device and in any order, without any state.

Every draw is a function of its keys (seed, layer, head, step, position), so it does not depend on
how many draws came before it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def uniform(seed: int, *keys: Tensor | int) -> Tensor:
    """float32 in (0, 1) for every entry of the broadcast int64 `keys`. At least one of them is a
    tensor.

    A chain of splitmix64 rounds (Steele, Lea and Flood, OOPSLA 2014) over the seed and the keys.
    """
    state: Tensor | int = seed
    for key in keys:
        state = _mix(torch.as_tensor(state) ^ _mix(torch.as_tensor(key)))
    assert isinstance(state, Tensor), "a draw needs a key"
    # 23 bits and a half are exact in float32; with 24 the largest draw would be rounded to 1.
    return _shift(state, 41).to(torch.float32).add_(0.5).mul_(1 / (1 << 23))


def gumbel(drawn: Tensor) -> Tensor:
    """Standard Gumbel numbers, float32, from numbers of `uniform`. The top k of log p + gumbel are
    a draw of k entries without replacement with probabilities p."""
    return -(-drawn.log()).log()


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift int64 to the right by `bits`, with zeros from the left."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = x.to(torch.int64) + _signed(0x9E3779B97F4A7C15)  # a copy, which the rest changes in place
    x.bitwise_xor_(_shift(x, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    x.bitwise_xor_(_shift(x, 27)).mul_(_signed(0x94D049BB133111EB))
    return x.bitwise_xor_(_shift(x, 31))


def _signed(x: int) -> int:
    """The int64 with the same bits as the unsigned x, whose highest bit is set."""
    return x - (1 << 64)
