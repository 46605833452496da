"""From logits to one token: greedy, or a draw that depends only on the seed and the position.

Because every draw is keyed by (seed, position), there is no generator state to restore when a turn
is stopped, and the same question gets the same answer when it is asked again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from minikv import checks
from minikv.errors import NumericsError
from minikv.kernels.dispatch import Kernels

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. Temperature 0 is greedy and ignores the other three.

    Order: temperature, top_k, top_p, min_p. `top_k` 0, `top_p` 1 and `min_p` 0 switch a filter off.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        checks.number("temperature", self.temperature, 0.0, 100.0)
        checks.whole("top_k", self.top_k, 0, 1 << 31)
        checks.number("top_p", self.top_p, 0.0, 1.0)
        checks.number("min_p", self.min_p, 0.0, 1.0)


def pick(
    logits: Tensor, vocab: int, sampling: Sampling, seed: int, position: int, ops: Kernels
) -> int:
    """One token id from logits [V]. Logits from `vocab` on are padding and are never chosen.

    position: of the new token in the conversation. ops: the kernels, which filter and draw. Raises
    NumericsError if one of the first `vocab` logits is NaN or infinite.
    """
    logits = logits[:vocab].float()
    if not finite(logits):
        raise NumericsError(
            f"the network produced NaN or infinite logits at position {position:,}",
            'the turn was stopped; try `dtype="float32"`',
        )
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    point = torch.tensor(draw(seed, position), dtype=torch.float64)
    s = sampling
    return int(ops.drawn(logits.cpu(), s.temperature, s.top_k, s.top_p, s.min_p, point))


def finite(logits: Tensor) -> bool:
    """Whether no number is NaN or infinite. One pass is enough, because with a NaN both the minimum
    and the maximum are NaN. Waits for the device once."""
    return all(map(math.isfinite, torch.stack(torch.aminmax(logits)).tolist()))


def draw(seed: int, position: int) -> float:
    """A random number in [0, 1), keyed by (seed, position), for the token at that position."""
    generator = torch.Generator("cpu").manual_seed(_mix(seed, position))
    return float(torch.rand((), generator=generator, dtype=torch.float64))


def _mix(seed: int, position: int) -> int:
    """Hash two integers to a 64-bit seed (splitmix64, Steele et al. 2014)."""
    value = ((seed & _MASK) * 0x9E3779B97F4A7C15 + position) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = ((value ^ (value >> shift)) * factor) & _MASK
    return value ^ (value >> 31)
