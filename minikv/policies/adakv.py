"""Ada-KV (arXiv 2407.11550, algorithm 1): head budgets by need, for any scores.

Each head's share of the layer's budget is its share of the layer's best rows, blended with an even
share (`alpha`, the safeguard of section 3.3). By default the blend is rounded so that the layer's
total is exact to the row; `rounding=official` is the authors' arithmetic. `alloc=floor` is kvpress'
rule: every head keeps `alpha` of its even share, and the rest goes to the layer's best rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minikv.errors import UsageError
from minikv.policies import options, pyramidkv, selection, snapkv
from minikv.policies.base import Scorer
from minikv.policies.options import Method, option
from minikv.policies.parts import Candidates, HeadAllocator


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaKV(HeadAllocator):
    """(1 - alpha) x need + alpha x even share."""

    name = "ada"
    summary = "head budgets by need"

    alpha: float = option(0.2, "share of the budget that is divided evenly", (0.0, 1.0))
    rounding: str = options.rounding()
    normalize: bool = option(
        False,
        "weigh a head's scores by how concentrated they are before heads are compared (as "
        "KVCache-Factory does, not the authors)",
    )
    alloc: str = option(
        "blend",
        "blend: the paper; floor: alpha of its even share is a head's own, the rest goes to the "
        "best tokens (kvpress)",
        ("blend", "floor"),
    )

    @property
    def drift(self) -> int:
        """1 with the authors' rounding, which raises a head by at most half a row; else 0."""
        return int(self.rounding == "official")

    def check(self, scorer: Scorer) -> None:
        official = self.rounding == "official"
        if self.alloc == "floor" and (official or self.normalize):
            other = "rounding=official" if official else "normalize"
            raise UsageError(
                f"ada: alloc=floor and {other} cannot be combined",
                "alloc=floor is kvpress' rule, which neither blends nor weighs; leave one out",
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
        return rows.view.ops.share(need, times, a.numerator, parts, have, total)

    def _floor(self, rows: Candidates, total: Tensor, most: int) -> Tensor:
        """kvpress' rule. The window's rows, which always stay, count as part of a head's own
        share."""
        heads, window = len(rows.free), rows.scorer.evidence.window
        each = total // heads + window
        own = ((each.to(torch.float64) * self.alpha).to(torch.int64) - window).clamp(min=0)
        sure = rows.best(own.expand(heads), most // heads)
        have = sure.sum(1)
        rest = replace(rows, free=rows.free & ~sure, counted=None)
        return have + rest.wanted(total - have.sum(), most)

    differs = (
        "heads sum to the layer's budget to the token; the authors' rounding drifts "
        "(rounding=official)",
        "alpha=0.2, as in the authors' scripts; the example in their README has 0.5",
        "scores are compared as they are, as in the authors' code; KVCache-Factory weighs each "
        "head's first (`normalize`)",
        "a head's budget is a blend; kvpress gives each head a floor instead (alloc=floor)",
        "first tokens that a scorer protects do not count in a head's own share; in kvpress they "
        "do",
        "with a decode policy each head keeps its own budget while an answer is written; the "
        "release then evicts nothing",
    )


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


ADAKV = Method(
    "adakv",
    "SnapKV's scores, with the layer's budget spread over heads by need",
    parts=(snapkv.SnapKV, AdaKV),
    good="a question, short answer",
    paper="2407.11550",
)

ADA_PYRAMID = Method(
    "ada-pyramid",
    "Ada-KV's head budgets within PyramidKV's layer budgets",
    parts=(snapkv.SnapKV, pyramidkv.PyramidKV, AdaKV),
    good="a question, short answer",
    paper="2407.11550",
)
