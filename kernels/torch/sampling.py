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

    point float64 []: a random number in [0, 1). The token is the one at this point of the
    cumulative probabilities, the most likely token first. The filters in order: temperature, top_k
    (0: off), top_p, min_p. If a logit is not finite, it is any token.
    """
    # Without subtracting the maximum first, a tiny temperature would give inf - inf.
    ranked, ids = torch.sort(logits, descending=True, stable=True)
    ranked = (ranked.double() - ranked[0].double()) / temperature
    if top_k:
        ranked = ranked[:top_k]
    chances = torch.softmax(ranked, 0)
    before = chances.cumsum(0) - chances
    # The best token always stays, also with top_p 0.
    first = torch.arange(len(chances), device=chances.device)
    keep = (before < top_p) & (chances >= min_p * chances[0]) | (first == 0)
    chances = torch.where(keep, chances, 0.0)
    edges = chances.cumsum(0)
    # right=True: a token of probability 0 has an empty interval and cannot be drawn.
    rank = torch.searchsorted(edges, (point * edges[-1])[None], right=True)
    rank = torch.minimum(rank, (first * keep).max())
    return ids.gather(0, rank)[0]


def _note(best: Tensor, logits: Tensor, token: Tensor, found: Tensor, finite: Tensor) -> None:
    good = torch.isfinite(logits).all()
    token.copy_(best)
    finite.copy_(good)
    found.copy_(torch.stack((best, good)))
