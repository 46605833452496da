"""From logits to the next token without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor


def greedy(logits: Tensor, token: Tensor, found: Tensor, finite: Tensor) -> None:
    """The token of the largest logit, of equal ones the first.

    logits float32 [V]. In place: token int64 [1]; finite bool []: whether all logits are finite (if
    not, the token is any of the V); found int64 [2]: both of them.
    """
    _note(logits.argmax(), logits, token, found, finite)


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
    finite: Tensor,
) -> None:
    """`drawn` of logits float32 [V] for the token after the one at `position` int64 [].

    draws float64 [N]: random numbers in [0, 1) of the tokens at first, first + 1, ..., `first`
    int64 []. In place, as in `greedy`: token, found and finite.
    """
    place = (position + 1 - first).clamp(0, len(draws) - 1)
    point = draws.gather(0, place[None])[0]
    best = drawn(logits, temperature, top_k, top_p, min_p, point)
    _note(best, logits, token, found, finite)


def drawn(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, point: Tensor
) -> Tensor:
    """int64 []: a token from finite float32 logits [V], at a temperature above 0.

    point float64 []: a random number in [0, 1). The tokens are ordered by their logits, the largest
    first, and of equal ones the smaller id. Each filter keeps the first of them: top_k so many (0:
    all); top_p those before which lies less than this share of what top_k kept; min_p those that
    are at least this share as likely as the first one. The first one always stays. The result is
    the token at this point of what all of them keep. If a logit is not finite, it is any token.

    Probabilities are whole numbers, multiples of 2^-44 of the largest one, so that sums are exact
    in any order. They have no error but that of exp, and of rounding it.
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
    # right=True: the first that ends behind the target. A token without mass ends with another.
    rank = torch.searchsorted(ends, target[None], right=True).clamp(max=last)
    return ids.gather(0, rank)[0]


def scale(vocab: int) -> float:
    """What the most likely of `vocab` tokens weighs, such that the sum of all is below 2^62."""
    return float(2.0 ** min(44, 62 - vocab.bit_length()))


def _note(best: Tensor, logits: Tensor, token: Tensor, found: Tensor, finite: Tensor) -> None:
    good = torch.isfinite(logits).all()
    token.copy_(best)
    finite.copy_(good)
    found.copy_(torch.stack((best, good)))
