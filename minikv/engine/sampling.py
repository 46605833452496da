"""From logits to one token: greedy, or a draw that depends only on the seed and the position.

Because every draw is keyed by (seed, position), there is no generator state to restore when a turn
is stopped, and the same question gets the same answer when it is asked again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minikv import checks
from minikv.errors import NumericsError

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


def pick(logits: Tensor, vocab: int, sampling: Sampling, seed: int, position: int) -> int:
    """One token id from logits [V]. Logits from `vocab` on are padding and are never chosen.

    position: that of the new token in the conversation. Raises NumericsError if one of the first
    `vocab` logits is NaN or infinite.
    """
    logits = logits[:vocab].float()
    if not bool(torch.isfinite(logits).all()):
        raise NumericsError(
            f"the network produced NaN or infinite logits at position {position:,}",
            'the turn was stopped; try `dtype="float32"`',
        )
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    point = torch.tensor(draw(seed, position), dtype=torch.float64)
    return int(choose(logits.cpu(), sampling, point))


def draw(seed: int, position: int) -> float:
    """A random number in [0, 1), keyed by (seed, position), for the token at that position."""
    generator = torch.Generator("cpu").manual_seed(_mix(seed, position))
    return float(torch.rand((), generator=generator, dtype=torch.float64))


def choose(logits: Tensor, sampling: Sampling, point: Tensor) -> Tensor:
    """int64 []: a token from finite float32 logits [V]. Reads no value back from the device.

    point float64 []: a random number in [0, 1). The token is the one at this point of the
    cumulative probabilities, the most likely token first. If a logit is not finite, it is any
    token.
    """
    if sampling.temperature == 0.0:
        return logits.argmax()
    # Without subtracting the maximum first, a tiny temperature would give inf - inf.
    ranked, ids = torch.sort(logits, descending=True, stable=True)
    ranked = (ranked.double() - ranked[0].double()) / sampling.temperature
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    chances = torch.softmax(ranked, 0)
    before = chances.cumsum(0) - chances
    # The best token always stays, also with top_p 0.
    first = torch.arange(len(chances), device=chances.device)
    keep = (before < sampling.top_p) & (chances >= sampling.min_p * chances[0]) | (first == 0)
    chances = torch.where(keep, chances, 0.0)
    edges = chances.cumsum(0)
    # right=True: a token of probability 0 has an empty interval and cannot be drawn.
    rank = torch.searchsorted(edges, (point * edges[-1])[None], right=True)
    rank = torch.minimum(rank, (first * keep).max())
    return ids.gather(0, rank)[0]


def _mix(seed: int, position: int) -> int:
    """Hash two integers to a 64-bit seed (splitmix64, Steele et al. 2014)."""
    value = ((seed & _MASK) * 0x9E3779B97F4A7C15 + position) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = ((value ^ (value >> shift)) * factor) & _MASK
    return value ^ (value >> 31)
