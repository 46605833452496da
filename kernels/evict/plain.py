"""Chooses which rows stay, by the order of their scores. No value is read back from the device.

A row is free if its score decides whether it stays. Counts are int64 [H]. `most` is an upper bound,
known on the host, of a number that only the device knows. Of rows with equal scores the younger
stays, and of these the one in the first head. `tests/policies/oracle.py` makes the same choices in
plain Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

evict: Mapping[str, Callable[..., None]] = {}
"""For step policies, by name: the whole end of a step for all heads, in one kernel. The torch form
is in the policy's own file.

It takes this step's logits [L, H, G, C] and lse [L, H, G], which it may overwrite, `Rows`,
free_slot [L, H], to which it writes each head's victim or -1, the policy's columns [R] in its
order, and the result of `StepPolicy.quota`, int64 [L, H].

h2o (arXiv 2306.14048, section 4) adds the step's probabilities to the column of sums; the row with
the lowest sum is the victim. quota: how many of a head's newest rows are kept.

roco (arXiv 2402.06262, section 4.2) adds the step's probability, its square and 1 to the columns of
sums, squares and counts; of the rows with the smallest variances, the one with the lowest mean is
the victim. quota: how many rows with the smallest variances are candidates."""

Tables = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""The tables of one layer: start, length, capacity, cap and free slot of each head, int64 [H]
each."""
NOT_FREE = torch.iinfo(torch.int64).min
"""The order key of a row that is not free."""


def divide(pos: Tensor, sinks: int, young: int, pinned: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which rows stay regardless of their score, and which are free: bool [H, N] each.

    pos int64 [H, N], -1 for no row. The rows below position `sinks` stay, those from `young` on,
    and those below `pinned`. Also int64 [3, H]: how many stay, how many of these are not pinned,
    and how many are free.
    """
    live = pos >= 0
    stays = ((pos < max(sinks, pinned)) | (pos >= young)) & live
    free = live & ~stays
    own = stays & (pos >= pinned)
    return stays, free, torch.stack((stays.sum(1), own.sum(1), free.sum(1)))


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


def share(need: Tensor, times: int, even: int, parts: int, most: Tensor, total: Tensor) -> Tensor:
    """Whole numbers near wish / parts, each <= most, which sum to min(total, sum of most).

    wish = need x times + total x even. Rounded by the method of largest remainders; of equal ones,
    the first head gets more. If a wish exceeds its `most`, the excess is divided evenly among the
    others. need int64 [H]: so that the wishes sum to parts x total; most int64 [H]; total int64 [].
    """
    wish = need * times + total * even
    total = torch.minimum(total, most.sum())
    full = most * parts
    # A head is full if there is enough to raise all heads by the amount that it lacks, or to their
    # `most` if that is less. The others are raised by the same amount.
    raised = torch.minimum(full, wish + (full - wish)[:, None])
    whole = total * parts
    is_full = raised.sum(1) <= whole
    others = (~is_full).sum()
    lift = whole - torch.where(is_full, full, wish).sum()
    unit = others.clamp(min=1) * parts
    exact = torch.where(is_full, most * unit, wish * others + lift)
    counts, heads = exact // unit, len(need)
    key = exact % unit * heads + torch.arange(heads - 1, -1, -1, device=need.device)
    rank = (key > key[:, None]).sum(1)
    return counts + (rank < total - counts.sum())


def fill(used: Tensor, total: int) -> Tensor:
    """Raise the lowest of `used` int64 [H] evenly until they sum to `total`; none is lowered.

    fill([3, 9, 3], 18) == [5, 9, 4].
    """
    # A head is raised if all heads with fewer rows can be raised to its level.
    raised = torch.maximum(used, used[:, None]).sum(1) <= total
    count = raised.sum()
    spare = total - (used * ~raised).sum()
    level = spare // count.clamp(min=1)
    low = used <= level
    extra = low & (low.cumsum(0) <= spare - level * count)
    return torch.where(count > 0, torch.maximum(used, level) + extra, used)


def ensure_least(counts: Tensor, sure: Tensor, free: Tensor, least: int) -> Tensor:
    """`counts` of free rows, changed so that each head keeps at least `least` rows, if possible.

    Heads that would keep fewer get rows from those that keep the most, one row after another. No
    head gives so many that it keeps fewer than `least`. sure: rows that a head keeps regardless of
    their score, without pinned ones. free: its free rows. All int64 [H].
    """
    if least == 0:
        return counts
    heads, rich = len(counts), counts + sure
    lack = torch.minimum(least - rich, free - counts).clamp(min=0)
    # The rows that heads can give, in order: the next comes from the head that then keeps most.
    each = torch.arange(heads * least, device=counts.device)
    left = rich[:, None] - each
    offers = (each < counts[:, None]) & (left > least)
    first = torch.arange(heads - 1, -1, -1, device=counts.device)[:, None]
    key = torch.where(offers, left * heads + first, -1)
    wanted = lack.cumsum(0)
    ordered = key.flatten().sort(descending=True).values
    edge = ordered.gather(0, (wanted[-1:] - 1).clamp(min=0))
    given = ((key >= edge) & offers).sum(1) * (wanted[-1] > 0)
    got = torch.minimum((given.sum() - wanted + lack).clamp(min=0), lack)
    return counts - given + got


def survivors(keep: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that stay, ascending by position: (index int64 [H, N], count int64 [H]).

    keep bool [H, N]; order int64 [H, B]: the first B rows by position; the others follow in their
    order. The rows that head h keeps are index[h, :count[h]]; later entries are undefined.
    """
    heads, rows = keep.shape
    early = order.shape[1]
    named = torch.arange(early, rows, device=keep.device).expand(heads, -1)
    if early:
        keep = torch.cat((keep[:, :early].gather(1, order), keep[:, early:]), 1)
        named = torch.cat((order, named), 1)
    place = torch.where(keep, keep.cumsum(1) - 1, rows)  # the others go to an extra column
    index = order.new_empty((heads, rows + 1)).scatter_(1, place, named)
    return index[:, :rows], keep.sum(1)


def lay_out(
    count: Tensor, begin: int, tables: Tables, floor: int, total: int, spare: int, owned: int
) -> None:
    """Write a layer's tables for heads that hold count int64 [H] rows, with adjacent segments from
    `begin` on. No head has a free slot.

    Caps are the numbers of rows held, raised evenly until they sum to `total` (-1: raised to at
    least `floor`). Capacities are `spare` rows above the caps, raised evenly until they sum to
    `owned` (-1: not raised).
    """
    start, length, capacity, cap, free_slot = tables
    length.copy_(count)
    cap.copy_(fill(count, total) if total >= 0 else count.clamp(min=floor))
    sizes = cap + spare
    capacity.copy_(fill(sizes, owned) if owned >= 0 else sizes)
    start.copy_(capacity.cumsum(0) - capacity + begin)
    free_slot.fill_(-1)


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
    exceeds `max_count`. The written rows share no memory with `old` and `new`. pos:
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
    """Like `gather_rows`, for columns: out[start[h] + r] = values[h, index[h, r]] in each of them.

    values [H, N] and out [R], of each column.
    """
    for h, (n, begin) in enumerate(torch.stack((count, start), 1).tolist()):
        for source, target in zip(values, out, strict=True):
            target[begin : begin + n] = source[h, index[h, :n]].to(target.dtype)
