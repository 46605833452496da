"""The arithmetic of choosing rows, as tensors: no value is read back from the device.

Counts are int64 [H]. `most` is a bound, known on the host, of a number that only the device knows.
Ties are decided the same way everywhere: the younger row, then the first head.
`tests/policies/oracle.py` says the same in plain Python, slowly.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

_FINEST = 10**7  # denominators up to here leave room in 64 bits for 10^7 rows and 64 heads
NOT_FREE = torch.iinfo(torch.int64).min
"""The order key of a row that is not free."""
_SURE, _PREFERRED = 0x7FFFFFFF << 32, 0x7FFFFFFE << 32  # above the key of every score


def best(scores: Tensor, pos: Tensor, free: Tensor, counts: Tensor, most: int) -> Tensor:
    """bool [H, N]: the counts[h] <= most best of each head's free rows, or all of them.

    scores float32, pos int64, free bool, all [H, N].
    """
    key = order_key(scores, pos, free)
    count = counts.clamp(max=free.shape[1])[:, None]
    found = key.topk(max(1, min(most, key.shape[1])), dim=1).values
    edge = found.gather(1, (count - 1).clamp(min=0))
    return free & (key >= edge) & (count > 0)


def wanted(scores: Tensor, pos: Tensor, free: Tensor, total: Tensor, most: int) -> Tensor:
    """int64 [H]: how many of the layer's `total` best free rows each head holds.

    scores, pos and free [H, N]; total int64 [], at most `most`.
    """
    key = order_key(scores, pos, free)
    flat = key.flatten()
    found = flat.topk(max(1, min(most, len(flat)))).values
    edge = found.gather(0, (total - 1).clamp(0, len(found) - 1)[None])
    sure = (key > edge).sum(1)
    tied = ((key == edge) & free).any(1)  # a position once a head: the first heads get it
    counts = sure + (tied & (tied.cumsum(0) <= total - sure.sum()))
    return torch.where(total >= free.sum(), free.sum(1), counts * (total > 0))


def share(wish: Tensor, parts: int, most: Tensor, total: Tensor) -> Tensor:
    """Whole numbers near wish / parts, each <= most, which sum to min(total, sum of most).

    Largest remainder, ties to the first. When a wish exceeds its `most`, the excess is divided
    evenly among the others. wish int64 [H] sums to parts x total; most int64 [H]; total int64 [].
    """
    heads = len(wish)
    total = torch.minimum(total, most.sum())
    # Every head is lifted by the same amount or full. In order of their room, the first are full.
    room, order = (most * parts - wish).sort(stable=True)
    full, rest = (most * parts)[order], wish[order]
    spare = total * parts - (full.cumsum(0) - full) - rest.flip(0).cumsum(0).flip(0)
    share_ = torch.arange(heads, 0, -1, device=wish.device)  # heads that divide the spare rows
    at = (room * share_ >= spare).to(torch.int8).argmax()[None]
    lift, open_ = spare.gather(0, at), share_.gather(0, at)
    unit = open_ * parts
    exact = torch.minimum(wish * open_ + lift, most * unit)
    counts = exact // unit
    remainder, left = exact - counts * unit, total - counts.sum()
    return counts + (_ranks(remainder.argsort(descending=True, stable=True)) < left)


def fill(used: Tensor, total: Tensor | int) -> Tensor:
    """Raise the lowest of `used` int64 [H] evenly until they sum to `total`; none is lowered.

    fill([3, 9, 3], 18) == [5, 9, 4]: what heads with room to spare may grow to.
    """
    line = used.sort().values
    above = line.flip(0).cumsum(0).flip(0) - line
    many = torch.arange(1, len(used) + 1, device=used.device)
    lifted = (line * many + above <= total).sum()[None]  # heads up to the common level
    at = (lifted - 1).clamp(min=0)
    spare = total - above.gather(0, at)
    level = spare // lifted.clamp(min=1)
    low = used <= level
    extra = low & (low.cumsum(0) <= spare - level * lifted)
    return torch.where(lifted > 0, torch.maximum(used, level) + extra, used)


def ensure_least(counts: Tensor, sure: Tensor, free: Tensor, least: int) -> Tensor:
    """`counts` of free rows, but a head that would keep fewer than `least` rows is given some by
    the richest heads, one row after the other. All int64 [H].

    sure: rows that a head keeps in any case, those that never leave not counted; free: rows it
    could choose from. Nobody gives what would leave it with fewer than `least`.
    """
    heads = len(counts)
    rich = counts + sure
    # What heads could give, one row after the other, each from who is richest by then.
    each = torch.arange(heads * least, device=counts.device)
    left = rich[:, None] - each
    offers = (each < counts[:, None]) & (left > least)
    first = torch.arange(heads, device=counts.device)[:, None]
    key = (left * heads + (heads - 1 - first)).masked_fill(~offers, -1)
    rank = _ranks(key.flatten().argsort(descending=True)).view(key.shape)
    lack = torch.minimum(least - rich, free - counts).clamp(min=0)
    given = (offers & (rank < lack.sum())).sum(1)
    got = (given.sum() - lack.cumsum(0) + lack).clamp(min=0)
    return counts - given + torch.minimum(got, lack)


def ranked(scores: Tensor, pos: Tensor, free: Tensor) -> Tensor:
    """float32 [H, N] in (0, 1]: the share of a head's free rows that a row is at least as good as.

    It stands in for scores of which only the order means something. Ties: the younger is better.
    """
    young = pos.argsort(dim=1, stable=True)
    order = young.gather(
        1, scores.masked_fill(~free, -torch.inf).gather(1, young).argsort(dim=1, stable=True)
    )
    places = torch.arange(1, pos.shape[1] + 1, device=pos.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, places)
    rank = rank - (~free).sum(1, keepdim=True)  # rows that are not free come first
    return (rank / free.sum(1, keepdim=True).clamp(min=1)).clamp(min=0.0)


def exact(alpha: float) -> Fraction:
    """The fraction that a decimal stands for, or, of more digits than 64 bits have room for, one
    less than 10^-7 away."""
    return Fraction(str(alpha)).limit_denominator(_FINEST)


def order_key(scores: Tensor, pos: Tensor, free: Tensor) -> Tensor:
    """int64 [H, N]: larger for a better row, of equal scores the younger; least if not free."""
    bits = (scores.to(torch.float32) + 0.0).view(torch.int32).to(torch.int64)  # -0.0 becomes 0.0
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return ((bits << 32) | pos.clamp(min=0)).masked_fill(~free, NOT_FREE)


def tiered_key(key: Tensor, pos: Tensor, sure: Tensor, preferred: Tensor | None) -> Tensor:
    """`order_key` of rows of which some, bool [H, N], are sure to stay, and some leave after all
    others."""
    young = pos.clamp(min=0)
    if preferred is not None:
        key = torch.where(preferred, _PREFERRED | young, key)
    return torch.where(sure, _SURE | young, key)


def _ranks(order: Tensor) -> Tensor:
    """The place of every entry in an order."""
    places = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)
