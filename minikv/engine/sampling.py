"""From logits to one token: greedy, or a draw that depends only on the seed and the position.

Keying every draw by (seed, position) means that there is no generator state to roll back when a
turn is stopped, and that the same question asked again is answered the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.errors import NumericsError, UsageError

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
        _within("--temperature", self.temperature, 0.0, 100.0)
        _within("--top-k", self.top_k, 0, 1 << 31)
        _within("--top-p", self.top_p, 0.0, 1.0)
        _within("--min-p", self.min_p, 0.0, 1.0)


def pick(logits: Tensor, vocab: int, sampling: Sampling, seed: int, position: int) -> int:
    """One token id from logits [V]; rows from `vocab` on are padding and are never chosen.

    `position` is where the token would stand in the conversation. Raises NumericsError when a
    logit of the real vocabulary is NaN or infinite.
    """
    logits = logits[:vocab].float()
    if not bool(torch.isfinite(logits).all()):
        raise NumericsError(
            f"the network produced NaN or infinite logits at position {position:,}",
            "the turn was stopped; try --dtype float32",
        )
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    point = torch.tensor(draw(seed, position), dtype=torch.float64)
    return int(choose(logits.cpu(), sampling, point))


def draw(seed: int, position: int) -> float:
    """A number in [0, 1), keyed by (seed, position), that decides the token to stand there."""
    generator = torch.Generator("cpu").manual_seed(_mix(seed, position))
    return float(torch.rand((), generator=generator, dtype=torch.float64))


def choose(logits: Tensor, sampling: Sampling, point: Tensor) -> Tensor:
    """int64 []: a token from the finite float32 logits [V], without asking the device for a value.

    point float64 []: where in [0, 1) of the chances, best token first, the drawn one lies. If a
    logit is not finite the token is any of the V.
    """
    if sampling.temperature == 0.0:
        return logits.argmax()
    # Shifting by the maximum first keeps a tiny temperature from overflowing to inf - inf.
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
    # right=True: a token of chance 0 owns no interval and cannot be drawn.
    rank = torch.searchsorted(edges, (point * edges[-1])[None], right=True)
    rank = torch.minimum(rank, (first * keep).max())
    return ids.gather(0, rank)[0]


def _mix(seed: int, position: int) -> int:
    """Two integers to one well-spread 64-bit seed (splitmix64, Steele et al. 2014)."""
    value = ((seed & _MASK) * 0x9E3779B97F4A7C15 + position) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = ((value ^ (value >> shift)) * factor) & _MASK
    return value ^ (value >> 31)


def _within(flag: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # NaN fails too
        raise UsageError(f"{flag} must be between {low:,} and {high:,}, got {value:,}")
