"""The arithmetic of choosing rows, as tensors: no value is read back from the device.

A row is free if its score decides whether it stays. Counts are int64 [H]. Of rows with equal scores
the younger stays, and of these the one in the first head. kernels/evict/plain.py finds the best
rows and divides counts among heads. `tests/policies/oracle.py` makes the same choices in plain
Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import Tensor

SURE = 1e19
"""A score from here on only ranks a row above others; `Span` does not pass it on."""


_FINEST = 10**7  # denominators up to here leave room in 64 bits for 10^7 rows and 64 heads


def blocks(heads: int, each: int, most: int) -> Iterator[slice]:
    """Divide `heads` heads of `each` numbers into slices of at most `most` numbers, but at least
    one head."""
    count = max(1, most // max(1, each))
    yield from (slice(lo, min(lo + count, heads)) for lo in range(0, heads, count))


def in_blocks(heads: int, each: int, most: int, make: Callable[[slice], Tensor]) -> Tensor:
    """The results of `make` for the slices of `blocks`, concatenated."""
    found = [make(some) for some in blocks(heads, each, most)]
    return found[0] if len(found) == 1 else torch.cat(found)


def largest_block(heads: int, each: int, most: int) -> int:
    """The most numbers that a slice of `blocks` has."""
    return each * min(heads, max(1, most // max(1, each)))


def order_of(pos: Tensor) -> Tensor:
    """int64 [H, N]: each head's rows by position, -1 first. pos int64 [H, N]."""
    return pos.sort(dim=1, stable=True).indices if pos.numel() else torch.empty_like(pos)


def in_order(x: Tensor, order: Tensor) -> Tensor:
    """x [..., H, N] with its first B rows in the `order` int64 [H, B]; the others follow."""
    early = order.shape[1]
    if not early:
        return x
    first = x[..., :early].gather(-1, order.expand(*x.shape[:-1], early))
    return torch.cat((first, x[..., early:]), -1)


def out_of_order(x: Tensor, order: Tensor) -> Tensor:
    """The x that `in_order` changed to this one."""
    early = order.shape[1]
    if not early:
        return x
    first = torch.empty_like(x[..., :early])
    first.scatter_(-1, order.expand_as(first), x[..., :early])
    return torch.cat((first, x[..., early:]), -1)


def ranked(scores: Tensor, pos: Tensor, free: Tensor) -> Tensor:
    """float32 [H, N] in (0, 1]: the share of the head's free rows that are no better than this row.

    It replaces scores of which only the order has a meaning. Of equal scores the younger row is
    better.
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
    """The decimal number as a fraction; if it has too many digits for 64-bit arithmetic, a fraction
    less than 10^-7 away."""
    return Fraction(str(alpha)).limit_denominator(_FINEST)


def pool(scores: Tensor, order: Tensor, free: Tensor, kernel: int, how: str) -> Tensor:
    """Pool each head's free rows with their neighbours by position.

    scores float32 [H, N] (or several of them, [..., H, N]), free [H, N] -> as scores. order int64
    [H, B]: the first B rows by position; the others follow in their order. The free rows are
    contiguous in this order. kernel: how many rows are pooled, odd. how: "max", or "avg", in which
    rows beyond the free ones count as 0, as those of the window do in SnapKV's release (arXiv
    2404.14469). Rows that are not free get -inf.
    """
    if kernel == 1:
        return scores.masked_fill(~free, -torch.inf)
    # Neighbours are meant in the text, but decode steps leave the rows in any order.
    line = in_order(scores.masked_fill(~free, -torch.inf if how == "max" else 0.0), order)
    pooled = F.max_pool1d if how == "max" else F.avg_pool1d
    line = out_of_order(pooled(line, kernel, 1, kernel // 2), order)
    return line.masked_fill(~free, -torch.inf)


def ones(word: Tensor) -> Tensor:
    """int64: how many of the 64 bits of each int64 are set."""
    x = word - ((word >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((x * 0x0101010101010101) >> 56) & 0xFF


def joined(mass: Tensor, how: str) -> Tensor:
    """[H, G, N] -> [H, N]: join the query heads of each KV head by mean, sum or max."""
    if how == "max":
        return mass.amax(1)
    return mass.sum(1) if how == "sum" else mass.mean(1)


def stayed(mass: Tensor, keep: Tensor, pos: Tensor) -> Tensor:
    """float32 [H]: the share of each head's attention mass on its kept rows.

    mass float32 [H, G, N], keep bool and pos int64 [H, N], -1 for rows that do not count.
    """
    mean = mass.mean(1) * (pos >= 0)
    return (mean * keep).sum(1) / mean.sum(1)
