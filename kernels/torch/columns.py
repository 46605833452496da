"""The policies' columns of the rows from before a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def carried_columns(
    columns: Sequence[Tensor], index: Tensor, live: Tensor, new: int
) -> list[Tensor]:
    """Each of the columns [R] as [H, N + new]: the values of the rows index int64 [H, N], and zero
    for those that are not `live` bool [H, N] and for `new` more."""
    heads, rows = index.shape
    found = []
    for column in columns:
        carried = column.new_zeros((heads, rows + new))
        carried[:, :rows] = column[index].masked_fill(~live, 0)
        found.append(carried)
    return found
