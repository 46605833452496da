"""Which rows stay, by the order of their scores: no value is read back from the device.

A row is free if its score decides whether it stays. Counts are int64 [H]. `most` is an upper bound,
known on the host, of a number that only the device knows. Of equal scores, the younger row stays,
then that of the first head. `tests/policies/oracle.py` makes the same choices in plain Python.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def survivors(keep: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that stay, ascending by position: (index int64 [H, N], count int64 [H]).

    keep bool [H, N]; order int64 [H, B]: the first B rows by position; the others follow as they
    are. The rows that head h keeps are index[h, :count[h]]; the entries after them may hold
    anything.
    """
    heads, rows = keep.shape
    early = order.shape[1]
    named = torch.arange(early, rows, device=keep.device).expand(heads, -1)
    if early:
        keep = torch.cat((keep[:, :early].gather(1, order), keep[:, early:]), 1)
        named = torch.cat((order, named), 1)
    place = torch.where(keep, keep.cumsum(1) - 1, rows)  # the others in a column of their own
    index = order.new_empty((heads, rows + 1)).scatter_(1, place, named)
    return index[:, :rows], keep.sum(1)


def gather_rows(
    index: Tensor,
    count: Tensor,
    start: Tensor,
    new: tuple[Tensor, Tensor],
    old: tuple[Tensor, Tensor, Tensor] | None,
    out: tuple[Tensor, Tensor],
    pos: tuple[Tensor, Tensor],
    max_count: int,
) -> None:
    """Copy k, v and pos of the rows that each head keeps into its segment, in place.

    index int64 [H, N], count and start int64 [H] (`survivors`): for r < count[h], row start[h] + r
    of `out` (k and v [R, D]) becomes row index[h, r] of head h. The rows of head h are those of
    `old` (k and v [E, D], and int64 [H, B]: which of them are the head's), followed by those of
    `new` (k and v [H, T, D]). Among a head's kept rows, those of `old` also come first. No count
    exceeds `max_count`. The rows that are written share no memory with `old` and `new`. pos:
    positions int64 [H, N], and int32 [R] for those of the rows of `out`.
    """
    before = 0 if old is None else old[2].shape[1]
    for h, (n, begin) in enumerate(torch.stack((count, start), 1).tolist()):
        rows, early = index[h, :n], 0
        if old is not None:
            early = int((rows < before).sum())
            at = old[2][h, rows[:early]]
        pos[1][begin : begin + n] = pos[0][h, rows].to(pos[1].dtype)
        rows = rows[early:] - before
        for i in (0, 1):
            target = out[i][begin : begin + n]
            if old is not None:
                torch.index_select(old[i], 0, at, out=target[:early])
            torch.index_select(new[i][h], 0, rows, out=target[early:])


def gather_columns(
    index: Tensor,
    count: Tensor,
    start: Tensor,
    values: Sequence[Tensor],
    out: Sequence[Tensor],
    max_count: int,
) -> None:
    """As `gather_rows` for columns: out[start[h] + r] = values[h, index[h, r]] in each of them.

    values [H, N] and out [R], of each column.
    """
    for h, (n, begin) in enumerate(torch.stack((count, start), 1).tolist()):
        for source, target in zip(values, out, strict=True):
            target[begin : begin + n] = source[h, index[h, :n]].to(target.dtype)
