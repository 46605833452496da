"""Chooses the next token from logits, without waiting for the device."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def greedy(logits: Tensor, token: Tensor, found: Tensor) -> None:
    """Choose the token of the largest logit; of equal ones, the first.

    logits float32 [V]. In place: token int64 [1]; found int64 [2]: the token, and whether all
    logits are finite (if not, the token is any of the V).
    """
    lines = _lines(logits)
    most, at = lines.max(1)
    line = most.argmax()
    _note(line * lines.shape[1] + at.gather(0, line[None])[0], logits, token, found)


def sample(
    logits: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    draws: Tensor,
    first: Tensor,
    position: Tensor,
    token: Tensor,
    found: Tensor,
) -> None:
    """Choose the token after the one at `position` int64 [] from logits float32 [V], as `drawn`
    does.

    draws float64 [N]: random numbers in [0, 1), for the tokens at positions first, first + 1 and so
    on; first int64 []. In place, as in `greedy`: token and found.
    """
    place = (position + 1 - first).clamp(0, len(draws) - 1)
    point = draws.gather(0, place[None])[0]
    _note(drawn(logits, temperature, top_k, top_p, min_p, point), logits, token, found)


def drawn(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, point: Tensor
) -> Tensor:
    """int64 []: sample a token from finite float32 logits [V], at a temperature above 0.

    point float64 []: a random number in [0, 1). The tokens are ordered by their logits, the largest
    first; of equal logits, the smaller id first. Each filter keeps the first tokens of this order.
    top_k: this many tokens (0: all). top_p: every token whose predecessors together have less than
    this share of the probability that top_k kept. min_p: every token that is at least this many
    times as likely as the first. The first token always stays. The result is the first kept token
    at which the sum of probabilities is above the share `point` of the kept ones' sum. If a logit
    is not finite, the result is any token.

    Probabilities are whole numbers: the largest is `scale`, which is 2^44 for fewer than 2^18
    tokens. So sums are exact in any order, and the only errors are those of exp and of its
    rounding.
    """
    ranked, ids = torch.sort(logits, descending=True, stable=True)
    # Without subtracting the maximum first, a tiny temperature would give inf - inf.
    chance = torch.exp((ranked.double() - ranked[0].double()) / temperature)
    mass = torch.round(chance * scale(len(logits))).long()
    ends, last = mass.cumsum(0), len(mass) - 1
    kept = ends[min(top_k, len(mass)) - 1]  # -1: all
    if top_p < 1.0:
        least = torch.ceil(kept.double() * top_p).long().clamp(min=1)
        kept = ends.gather(0, torch.searchsorted(ends, least[None]).clamp(max=last))[0]
    kept = torch.minimum(kept, torch.where(chance >= min_p, mass, 0).sum())
    target = (kept.double() * point).long()
    # right=True: the first token whose sum is above the target. A token of probability 0 is never
    # found, because its sum is that of the token before it.
    rank = torch.searchsorted(ends, target[None], right=True).clamp(max=last)
    return ids.gather(0, rank)[0]


def scale(vocab: int) -> float:
    """The whole number for the most likely of `vocab` tokens. The sum of all is then below 2^62."""
    return float(2.0 ** min(44, 62 - vocab.bit_length()))


def _note(best: Tensor, logits: Tensor, token: Tensor, found: Tensor) -> None:
    token.copy_(best)
    ends = torch.stack(torch.aminmax(_lines(logits), dim=1))  # of a line with a NaN, both are NaN
    found.copy_(torch.stack((best, torch.isfinite(ends).all())))


def _lines(logits: Tensor) -> Tensor:
    """[V] as [lines, numbers], to be reduced in two steps: a GPU takes 28 us for one reduction of
    128,256 numbers to one."""
    return logits.view(-1, math.gcd(len(logits), 256))
