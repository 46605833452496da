"""Ada-KV (arXiv 2407.11550, algorithm 1): head budgets by need, for any scores.

The layer's budget goes to the heads in proportion to how many of the layer's best rows each holds,
blended with an even share (`alpha`, the safeguard of section 3.3). By default the blend is rounded
so that the layer's total is exact to the row; `rounding=official` is the authors' arithmetic.
`alloc=floor` is kvpress' rule: every head keeps `alpha` of its even share, and the rest goes to the
layer's best rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minikv.errors import UsageError
from minikv.policies import selection
from minikv.policies.base import Candidates, HeadAllocator, Scorer


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaKV(HeadAllocator):
    """(1 - alpha) x need + alpha x even share."""

    alpha: float
    rounding: str
    normalize: bool
    alloc: str

    @property
    def drift(self) -> int:
        """1 with the authors' rounding, which raises a head by at most half a row; else 0."""
        return int(self.rounding == "official")

    def check(self, scorer: Scorer) -> None:
        official = self.rounding == "official"
        if self.alloc == "floor" and (official or self.normalize):
            other = "rounding=official" if official else "normalize"
            raise UsageError(
                f"ada: alloc=floor and {other} do not go together",
                "one is kvpress' rule, which blends and weighs nothing; leave one out",
            )
        if self.normalize and not scorer.evidence.adds_up:
            raise UsageError(
                "ada: normalize needs scores that add up, as attention does", "leave it out here"
            )

    def share(self, rows: Candidates, total: Tensor, most: int) -> Tensor:
        if self.alloc == "floor":
            return self._floor(rows, total, most)
        heads, have, weighed = len(rows.free), rows.have, rows
        if self.normalize:
            scores = normalized(rows.scores, rows.free, total // heads, most // heads)
            weighed = replace(rows, scores=scores)
        need = weighed.wanted(total, most)
        if self.rounding == "official":
            floor = ((total // heads).to(torch.float64) * self.alpha).to(torch.int64)
            blend = need.to(torch.float32) * (1 - self.alpha) + floor
            return torch.minimum(blend.round().to(torch.int64), have)
        a = selection.exact(self.alpha)
        times, parts = (a.denominator - a.numerator) * heads, a.denominator * heads
        return selection.share(need, times, a.numerator, parts, have, total)

    def _floor(self, rows: Candidates, total: Tensor, most: int) -> Tensor:
        """kvpress' rule. The window's rows, which are kept in any case, count as part of a head's
        own share."""
        heads, window = len(rows.free), rows.scorer.evidence.window
        each = total // heads + window
        own = ((each.to(torch.float64) * self.alpha).to(torch.int64) - window).clamp(min=0)
        sure = rows.best(own.expand(heads), most // heads)
        have = sure.sum(1)
        rest = replace(rows, free=rows.free & ~sure, counted=None)
        return have + rest.wanted(total - have.sum(), most)


def normalized(scores: Tensor, free: Tensor, each: Tensor, most: int) -> Tensor:
    """Multiply each head's scores [H, N] by the share of their sum that its best `each` rows have.
    Only free rows count.

    each int64 []: at most `most`.
    """
    live = scores.masked_fill(~free, 0.0)
    largest = live.topk(min(most, live.shape[1])).values
    counts = torch.arange(largest.shape[1], device=largest.device) < each
    held = largest.masked_fill(~counts, 0.0).sum(1, dtype=torch.float64)
    weight = held / live.sum(1, dtype=torch.float64).clamp(min=1e-30)
    return scores * weight.to(scores.dtype)[:, None]
