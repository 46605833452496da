"""Attention of a prompt's queries in float64, and what a kernel says of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minikv.kernels import Part, Queries


def weights(
    q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor, window: int | None
) -> tuple[Tensor, Tensor]:
    """float64 probabilities [H, G, T, N] and log-sum-exps [H, G, T] of q [H, G, T, D]."""
    logits = torch.einsum("hgtd,hnd->hgtn", q.double(), k.double().nan_to_num(0.0))
    distance = q_pos[None, :, None] - k_pos[:, None]
    seen = (distance >= 0) & (k_pos >= 0)[:, None]
    if window is not None:
        seen &= distance < window
    logits = (logits / math.sqrt(q.shape[-1])).masked_fill(~seen[:, None], -math.inf)
    return logits.softmax(-1).nan_to_num(0.0), logits.logsumexp(-1)


def observed(
    add: Callable[..., None],
    queries: Queries,
    parts: Sequence[Part],
    new: Callable[[Tensor], Tensor] = Tensor.clone,
) -> tuple[Tensor, Tensor]:
    """What an `add_attention_mass` makes of zeros, part by part: mass [H, G, N], squares [H, N].
    For the first part it is told of the zeros, and given other numbers.

    new: what becomes of a tensor before it is given away.
    """
    found: list[tuple[Tensor, Tensor]] = []
    for part in parts:
        shape, fresh, sides = part[1].shape[1], not found, queries.q.shape
        mass, squares = (
            new(torch.full((*size, shape), 7.0 * fresh)) for size in (sides[:2], sides[:1])
        )
        add(mass, squares, queries, part, fresh=fresh)
        found.append((mass, squares))
    return torch.cat([mass for mass, _ in found], 2), torch.cat([s for _, s in found], 1)
