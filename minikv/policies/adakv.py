"""Ada-KV (arXiv 2407.11550, algorithm 1): head budgets by need, over any scores.

The layer's budget goes to the heads in proportion to how many of the layer's best rows each holds,
blended with an even share (`alpha`, the safeguard of section 3.3). By default the blend is rounded
so that the layer's total is exact to the row; `rounding=official` is the authors' arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import torch
from torch import Tensor

from minikv.errors import UsageError
from minikv.policies import selection
from minikv.policies.base import DeviceHeads, Evidence, Heads, best, share


def wanted(scores: Tensor, pos: Tensor, free: Tensor, total: int) -> list[int]:
    """How many of the layer's `total` best free rows each head holds.

    scores, pos and free [H, N]. Equal scores: the younger row, then the first head.
    """
    heads, rows = scores.shape
    flat = scores.masked_fill(~free, -torch.inf).reshape(-1)
    if total <= 0:
        return [0] * heads
    if total >= int(free.sum()):
        return [int(n) for n in free.sum(1)]
    edge = torch.topk(flat, total).values[-1]
    sure = (flat > edge).view(heads, rows).sum(1)
    tied = (flat == edge).nonzero().squeeze(1)
    young = torch.argsort(pos.reshape(-1)[tied], descending=True, stable=True)
    chosen = tied[young[: total - int(sure.sum())]]
    counts = sure + torch.bincount(chosen // rows, minlength=heads)
    return [int(n) for n in counts]


def normalized(scores: Tensor, free: Tensor, each: int) -> Tensor:
    """Weigh each head's scores [H, N] by the share of its mass that its best `each` rows hold."""
    live = scores.masked_fill(~free, 0.0)
    held = live.topk(min(each, live.shape[1])).values.sum(1, dtype=torch.float64)
    weight = held / live.sum(1, dtype=torch.float64).clamp(min=1e-30)
    return scores * weight.to(scores.dtype)[:, None]


def floor_heads(alpha: float, window: int = 0) -> Heads:
    """Heads: `alpha` of its even share is a head's own, all else goes to the layer's best rows.

    kvpress' rule; `window` rows a head are kept anyway and count in its own share.
    """

    def spread(scores: Tensor, pos: Tensor, free: Tensor, total: int) -> list[int]:
        each = total // len(free)
        sure = torch.zeros_like(free)
        for h in range(len(free)):
            own = max(0, int((each + window) * alpha) - window)
            sure[h] = best(scores[h], pos[h], free[h], own)
        rest = wanted(scores, pos, free & ~sure, max(0, total - int(sure.sum())))
        return [int(n) + m for n, m in zip(sure.sum(1), rest, strict=True)]

    return spread


def adaptive_heads(alpha: float, rounding: str = "exact", normalize: bool = False) -> Heads:
    """Heads: (1 - alpha) x need + alpha x even share, b rows a head on average."""

    def spread(scores: Tensor, pos: Tensor, free: Tensor, total: int) -> list[int]:
        most = [int(n) for n in free.sum(1)]
        if normalize:
            scores = normalized(scores, free, total // len(most))
        need = wanted(scores, pos, free, total)
        if rounding == "official":
            each = total // len(most)
            floor = int(each * alpha)
            blend = torch.tensor(need, dtype=torch.float32) * (1 - alpha) + floor
            return [min(int(n), m) for n, m in zip(blend.round(), most, strict=True)]
        a, even = selection.exact(alpha), Fraction(total, len(most))
        return share([(1 - a) * n + a * even for n in need], most, total)

    return spread


def heads(options: Mapping[str, object], evidence: Evidence) -> Heads:
    """Heads by need, from the options. Raises UsageError where they contradict each other."""
    alpha, official = options["alpha"], options["rounding"] == "official"
    assert isinstance(alpha, float)
    if options["alloc"] == "floor":
        if official or options["normalize"]:
            other = "rounding=official" if official else "normalize"
            raise UsageError(
                f"ada: alloc=floor and {other} do not go together",
                "one is kvpress' rule, which blends and weighs nothing; leave one out",
            )
        return floor_heads(alpha, evidence.window)
    if options["normalize"] and not evidence.weighs:
        raise UsageError(
            "ada: normalize needs scores that add up, as attention does", "leave it out here"
        )
    return adaptive_heads(alpha, str(options["rounding"]), bool(options["normalize"]))


def device_heads(options: Mapping[str, object], evidence: Evidence) -> DeviceHeads:
    """`heads` where the scores are."""
    alpha = options["alpha"]
    assert isinstance(alpha, float)
    if options["alloc"] == "floor":
        return selection.floor_heads(alpha, evidence.window)
    return selection.adaptive_heads(alpha, str(options["rounding"]), bool(options["normalize"]))
