"""Expected Attention (arXiv 2510.00636, section 3): moments of queries, and the attention that
queries with these moments give."""

from __future__ import annotations

import torch
from torch import Tensor


def added_moments(sums: Tensor, outer: Tensor, q: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """sums float64 [H, G, D] and outer float64 [H, G, D, D] with the queries q [H, G, T, D] and
    their outer products added.

    The queries were rotated by angle float64 [T, D / 2], in radians, which is undone first.
    """
    q = q.to(torch.float64)
    one, two = q.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    q = torch.cat((one * cos + two * sin, two * cos - one * sin), -1)
    return sums + q.sum(2), outer + q.transpose(2, 3) @ q


def turned_moments(sums: Tensor, outer: Tensor, count: int, turn: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [H, G, D] and covariance [H, G, D, D] (population), float32, of `count` queries after
    the map `turn` float32 [D, D]. sums and outer: as in `added_moments`.

    turn: [[cos, -sin], [sin, cos]], each a diagonal matrix.
    """
    mean = sums / max(1, count)
    covariance = outer / max(1, count) - mean[..., None] * mean[..., None, :]
    mean, covariance = mean.to(torch.float32), covariance.to(torch.float32)
    return mean @ turn.T, turn @ covariance @ turn.T


def expected_attention(
    key: Tensor,
    free: Tensor,
    mean: Tensor,
    covariance: Tensor | None = None,
    value: Tensor | None = None,
    epsilon: float = 0.0,
    most: int = 1 << 16,
) -> Tensor:
    """The attention that a normally distributed query is expected to give each row, the mean over
    G: float32 [H, N].

    key and value [H, N, D]; mean float32 [H, G, D] and covariance float32 [H, G, D, D] of the
    queries; None: 0. The softmax is over the rows that are free bool [H, N]; others get 0. value:
    `epsilon` is added, and the sum multiplied by the length of the row's value. About `most`
    numbers are computed at once.
    """
    (heads, rows, size), group, found = key.shape, mean.shape[1], []
    count = max(1, most // max(1, group * rows * size))
    for lo in range(0, heads, count):
        some = slice(lo, lo + count)
        line = key[some].float()
        logits = mean[some] @ line.transpose(1, 2) * size**-0.5  # [h, G, N]
        if covariance is not None:
            line = line[:, None]
            logits += ((line @ covariance[some]) * line).sum(-1) / (2 * size)
        worth = logits.masked_fill(~free[some, None], -torch.inf).softmax(-1).mean(1)
        if value is not None:
            length = torch.linalg.vector_norm(value[some].float(), dim=-1)
            worth = (worth + epsilon) * length
        found.append(worth)
    return torch.cat(found)
