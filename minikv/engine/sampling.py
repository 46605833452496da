"""From logits to one token: greedy, or a draw that depends only on the seed and the position.

Because every draw is keyed by (seed, position), there is no generator state to restore when a turn
is stopped, and a question that is asked again gets the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minikv import checks
from minikv.errors import NumericsError
from minikv.kernels.dispatch import Kernels

WINDOW = 64
"""How many of the last tokens `repeat_penalty` considers, as in llama.cpp."""
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. Temperature 0 is greedy and ignores the filters.

    Order: repeat_penalty, temperature, top_k, top_p, min_p. `top_k` 0, `top_p` 1 and `min_p` 0 turn
    a filter off, `repeat_penalty` 1 the penalty (see `penalized`).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0

    def __post_init__(self) -> None:
        checks.number("temperature", self.temperature, 0.0, 100.0)
        checks.whole("top_k", self.top_k, 0, 1 << 31)
        checks.number("top_p", self.top_p, 0.0, 1.0)
        checks.number("min_p", self.min_p, 0.0, 1.0)
        checks.number("repeat_penalty", self.repeat_penalty, 0.1, 10.0)

    @property
    def filters(self) -> tuple[float, int, float, float]:
        """The temperature and what is left to draw from, as the kernels take them."""
        return self.temperature, self.top_k, self.top_p, self.min_p

    @property
    def penalizes(self) -> bool:
        """Whether the last tokens change the logits."""
        return self.repeat_penalty != 1.0


def pick(
    logits: Tensor,
    vocab: int,
    sampling: Sampling,
    seed: int,
    position: int,
    ops: Kernels,
    recent: Sequence[int] = (),
) -> int:
    """One token id from logits [V]. Logits from `vocab` on are padding and are never chosen.

    position: of the new token in the conversation. ops: the kernels, which filter and draw. recent:
    the tokens before it, those of the prompt included; the last `WINDOW` of them are penalized.
    Raises NumericsError if one of the first `vocab` logits is NaN or infinite.
    """
    logits = logits[:vocab].float()
    if sampling.penalizes and recent:
        ids = torch.tensor(recent[-WINDOW:], dtype=torch.int64, device=logits.device)
        logits = penalized(logits, ids, sampling.repeat_penalty)
    if not finite(logits):
        raise NumericsError(
            f"the network produced NaN or infinite logits at position {position:,}",
            'the turn was stopped; try `dtype="float32"`',
        )
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    point = torch.tensor(draw(seed, position), dtype=torch.float64)
    return int(ops.drawn(logits.cpu(), *sampling.filters, point))


def penalized(logits: Tensor, ids: Tensor, penalty: float) -> Tensor:
    """The logits [V] with those of `ids` divided by the penalty, or, if they are not above 0,
    multiplied by it. An id that occurs several times counts once (Keskar et al. 2019, with the rule
    for negative logits of llama.cpp and transformers). Does not wait for the device. Ids from V on,
    which are markers that are never chosen, have no effect."""
    ids = ids.clamp(max=len(logits))  # too large ids share one extra entry
    wide = torch.cat((logits, logits.new_zeros(1)))
    found = wide.gather(0, ids)
    by = torch.full_like(found, penalty)  # CUDA would divide by a number with its inverse
    return wide.scatter(0, ids, torch.where(found > 0, found / by, found * by))[:-1]


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
