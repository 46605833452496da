"""The arithmetic of choosing, where the scores are: nothing is asked of the device.

The functions of the same names in `policy` and `policies.adakv` count on the host and say what must
come out; these give the same rows and counts to the last one, ties included. Counts are int64 [H]
on the device. `most` is the host's bound on a number that only the device knows.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from minikv.policies.base import DeviceHeads, PromptView

_FINEST = 10**7  # denominators up to here leave room in 64 bits for 10^7 rows and 64 heads
_NONE = torch.iinfo(torch.int64).min


def best(scores: Tensor, pos: Tensor, free: Tensor, counts: Tensor, most: int) -> Tensor:
    """bool [H, N]: the counts[h] <= most best of each head's free rows, or all of them."""
    key = _order(scores, pos, free)
    count = counts.clamp(max=free.shape[1])[:, None]
    found = key.topk(max(1, min(most, key.shape[1])), dim=1).values
    edge = found.gather(1, (count - 1).clamp(min=0))
    return free & (key >= edge) & (count > 0)


def top(view: PromptView, scores: Tensor, free: Tensor, counts: Tensor, most: int) -> Tensor:
    """DeviceSelector: the best rows of each head."""
    return best(scores, view.pos, free, counts, most)


def wanted(scores: Tensor, pos: Tensor, free: Tensor, total: Tensor, most: int) -> Tensor:
    """How many of the layer's `total` best free rows each head holds."""
    key = _order(scores, pos, free)
    flat = key.flatten()
    found = flat.topk(max(1, min(most, len(flat)))).values
    edge = found.gather(0, (total - 1).clamp(0, len(found) - 1)[None])
    sure = (key > edge).sum(1)
    tied = ((key == edge) & free).any(1)  # a position once a head: the first heads get it
    counts = sure + (tied & (tied.cumsum(0) <= total - sure.sum()))
    return torch.where(total >= free.sum(), free.sum(1), counts * (total > 0))


def share(wish: Tensor, parts: int, most: Tensor, total: Tensor) -> Tensor:
    """Whole numbers near wish / parts, each <= most, which sum to min(total, sum of most).

    wish int64 [H] sums to parts x total; most int64 [H].
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
    """Raise the lowest of `used` evenly until they sum to `total`; none is lowered."""
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


def spread(counts: Tensor, sure: Tensor, free: Tensor, least: int) -> Tensor:
    """A head that would keep too little gets rows from the richest ones; see `policy.spread`."""
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


def even_heads(scores: Tensor, pos: Tensor, free: Tensor, total: Tensor, most: int) -> Tensor:
    """DeviceHeads: the same for all, as far as a head has rows."""
    return share(total.expand(len(free)), len(free), free.sum(1), total)


def exact(alpha: float) -> Fraction:
    """The fraction that a decimal stands for, or, of more digits than 64 bits have room for, one
    less than 10^-7 away."""
    return Fraction(str(alpha)).limit_denominator(_FINEST)


def normalized(scores: Tensor, free: Tensor, each: Tensor, most: int) -> Tensor:
    """`policies.adakv.normalized`; each int64 [] <= most."""
    live = scores.masked_fill(~free, 0.0)
    found = live.topk(min(most, live.shape[1])).values
    mine = torch.arange(found.shape[1], device=found.device) < each
    held = found.masked_fill(~mine, 0.0).sum(1, dtype=torch.float64)
    weight = held / live.sum(1, dtype=torch.float64).clamp(min=1e-30)
    return scores * weight.to(scores.dtype)[:, None]


def floor_heads(alpha: float, window: int = 0) -> DeviceHeads:
    """DeviceHeads as `policies.adakv.floor_heads`."""

    def spread(scores: Tensor, pos: Tensor, free: Tensor, total: Tensor, most: int) -> Tensor:
        each = total // len(free) + window
        own = ((each.to(torch.float64) * alpha).to(torch.int64) - window).clamp(min=0)
        sure = best(scores, pos, free, own.expand(len(free)), most // len(free))
        have = sure.sum(1)
        return have + wanted(scores, pos, free & ~sure, total - have.sum(), most)

    return spread


def adaptive_heads(alpha: float, rounding: str = "exact", normalize: bool = False) -> DeviceHeads:
    """DeviceHeads as `policies.adakv.adaptive_heads`."""
    a = exact(alpha)

    def spread(scores: Tensor, pos: Tensor, free: Tensor, total: Tensor, most: int) -> Tensor:
        heads, have = len(free), free.sum(1)
        if normalize:
            scores = normalized(scores, free, total // heads, most // heads)
        need = wanted(scores, pos, free, total, most)
        if rounding == "official":
            floor = ((total // heads).to(torch.float64) * alpha).to(torch.int64)
            blend = need.to(torch.float32) * (1 - alpha) + floor
            return torch.minimum(blend.round().to(torch.int64), have)
        wish = need * ((a.denominator - a.numerator) * heads) + total * a.numerator
        return share(wish, a.denominator * heads, have, total)

    return spread


def _order(scores: Tensor, pos: Tensor, free: Tensor) -> Tensor:
    """int64 [H, N]: larger for a better row, of equal scores the younger; least if not free."""
    bits = (scores.to(torch.float32) + 0.0).view(torch.int32).to(torch.int64)  # -0.0 becomes 0.0
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return ((bits << 32) | pos.clamp(min=0)).masked_fill(~free, _NONE)


def _ranks(order: Tensor) -> Tensor:
    """The place of every entry in an order."""
    places = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)
