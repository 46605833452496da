"""After a prompt: the rows that stay move into the segments of their heads."""

from __future__ import annotations

import torch
from torch import Tensor


def survivors(keep: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that stay, ascending by position: (index int64 [H, N], count int64 [H]).

    keep bool, pos int64 [H, N]. The rows that head h keeps are index[h, :count[h]]. Rows of equal
    position stay in their order.
    """
    order = pos.masked_fill(~keep, torch.iinfo(pos.dtype).max).argsort(dim=1, stable=True)
    return order, keep.sum(1)


def gather_rows(
    index: Tensor,
    count: Tensor,
    start: Tensor,
    new: tuple[Tensor, Tensor],
    old: tuple[Tensor, Tensor, Tensor] | None,
    out: tuple[Tensor, Tensor],
    max_count: int,
) -> None:
    """Move the rows that each head keeps into its segment: k and v, in place.

    index int64 [H, N], count and start int64 [H] (`survivors`): for r < count[h], row start[h] + r
    of `out` (k and v [R, D]) becomes row index[h, r] of head h. The rows of head h are those of
    `old` (k and v [E, D], and int64 [H, B]: which of them are the head's), followed by those of
    `new` (k and v [H, T, D]). Of the kept rows, too, those of `old` come first. No count exceeds
    `max_count`. `old` and `new` share no row with those that are written.
    """
    before = 0 if old is None else old[2].shape[1]
    for h, (n, begin) in enumerate(torch.stack((count, start), 1).tolist()):
        rows, early = index[h, :n], 0
        if old is not None:
            early = int((rows < before).sum())
            at = old[2][h, rows[:early]]
        rows = rows[early:] - before
        for i in (0, 1):
            target = out[i][begin : begin + n]
            if old is not None:
                torch.index_select(old[i], 0, at, out=target[:early])
            torch.index_select(new[i][h], 0, rows, out=target[early:])


def gather_column(
    index: Tensor, count: Tensor, start: Tensor, values: Tensor, out: Tensor, max_count: int
) -> None:
    """As `gather_rows` for one column: out[start[h] + r] = values[h, index[h, r]].

    values [H, N]; out [R].
    """
    for h, (n, begin) in enumerate(torch.stack((count, start), 1).tolist()):
        out[begin : begin + n] = values[h, index[h, :n]].to(out.dtype)
