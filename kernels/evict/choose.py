"""Which rows stay, by the order of their scores: no value is read back from the device.

A row is free if its score decides whether it stays. Counts are int64 [H]. `most` is an upper bound,
known on the host, of a number that only the device knows. Of equal scores, the younger row stays,
then that of the first head. `tests/policies/oracle.py` makes the same choices in plain Python.
"""

from __future__ import annotations

import torch
from torch import Tensor

NOT_FREE = torch.iinfo(torch.int64).min
"""The order key of a row that is not free."""


def order_key(scores: Tensor, pos: Tensor, free: Tensor) -> Tensor:
    """int64 [H, N]: larger for a higher score, then for a younger row; `NOT_FREE` if not free."""
    bits = (scores.to(torch.float32) + 0.0).view(torch.int32).to(torch.int64)  # -0.0 becomes 0.0
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return ((bits << 32) | pos.clamp(min=0)).masked_fill(~free, NOT_FREE)


def best(key: Tensor, counts: Tensor, most: int, also: Tensor | None = None) -> Tensor:
    """bool [H, N]: the counts[h] best free rows of each head, or all if it has fewer.

    key int64 [H, N]: their `order_key`. No count exceeds `most`. also bool [H, N]: further rows of
    the result.
    """
    count = counts.clamp(max=key.shape[1])[:, None]
    found = key.topk(max(1, min(most, key.shape[1])), dim=1).values
    edge = found.gather(1, (count - 1).clamp(min=0))
    chosen = (key > NOT_FREE) & (key >= edge) & (count > 0)
    return chosen if also is None else also | chosen


def wanted(key: Tensor, total: Tensor, most: int) -> Tensor:
    """int64 [H]: how many of the layer's `total` best free rows each head holds.

    key int64 [H, N]: their `order_key`. total int64 [], at most `most`.
    """
    flat, free = key.flatten(), key > NOT_FREE
    found = flat.topk(max(1, min(most, len(flat)))).values
    edge = found.gather(0, (total - 1).clamp(0, len(found) - 1)[None])
    sure = (key > edge).sum(1)
    tied = ((key == edge) & free).any(1)  # at most one row per head; first heads get it
    counts = sure + (tied & (tied.cumsum(0) <= total - sure.sum()))
    return torch.where(total >= free.sum(), free.sum(1), counts * (total > 0))
