"""A prompt that is read in blocks: which rows leave after a block, and where the others move.

A layer's heads have N rows each: pos int64 [H, N] ascends, apart from -1, where there is no row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minikv.kernels.torch.choose import leaving
from minikv.kernels.torch.gather import survivors


def lowest_block(
    scores: Tensor, free: Tensor, pos: Tensor, live: Tensor, limit: int
) -> tuple[Tensor, Tensor]:
    """Each head gives up as many rows as it holds above `limit`: the free ones with the lowest
    scores, of equal scores the oldest. All free rows leave if there are fewer.

    scores float32 [H, N], finite where free; free bool [H, N]: rows that may leave; live int64 [H]:
    how many rows a head holds. Returns the rows that stay as `survivors` does: (index int64 [H, N],
    count int64 [H]).
    """
    gone = leaving(scores, pos, free, (live - limit).clamp(min=0))
    return survivors((pos >= 0) & ~gone, pos[:, :0])


def compacted(
    index: Tensor, count: Tensor, k: Tensor, v: Tensor, pos: Tensor, columns: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Copies of k and v [H, N, D], pos and columns [H, N] in which each head's rows index[h,
    :count[h]] are the first ones.

    Behind them pos is -1, columns are 0, and k and v have any values. index and count are those of
    `survivors`.
    """
    heads, rows = pos.shape
    gone = torch.arange(rows, device=pos.device) >= count[:, None]
    index = index.masked_fill(gone, 0)
    first = torch.arange(heads, device=pos.device)[:, None] * rows
    at = (index + first).flatten()
    key, value = (t.flatten(0, 1).index_select(0, at).view_as(t) for t in (k, v))
    pos = pos.gather(1, index).masked_fill_(gone, -1)
    return key, value, pos, [c.gather(1, index).masked_fill_(gone, 0) for c in columns]
