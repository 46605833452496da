"""CriticalKV (arXiv 2502.03805, algorithm 1): scores also count what a row adds to the output.

A share of a head's rows (`by_score`, half by default) is chosen by score. The others are chosen, by
any selector, by the score times |v W_O|_1: the norm of the value after the output projection, mean
over the group's query heads. Where scores do not add up (`Evidence.adds_up`, e.g. key norms), their
ranks are used instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minikv.policies import selection
from minikv.policies.options import option
from minikv.policies.outputs import output_norms
from minikv.policies.parts import Candidates, Reweighter, Selector


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalKV(Reweighter):
    """The window's rows, which always stay, count in the share `by_score`."""

    name = "critical"
    summary = "values weighed by |v W_O|"

    by_score: float = option(0.5, "share of a head's tokens that the score alone picks", (0.0, 1.0))
    epsilon: float = option(1e-4, "added to the score, so that large values count", (0.0, 1.0))

    def select(self, rows: Candidates, counts: Tensor, most: int, selector: Selector) -> Tensor:
        view, free, evidence = rows.view, rows.free, rows.scorer.evidence
        sure = ((counts + evidence.window).to(torch.float64) * self.by_score).to(torch.int64)
        sure = torch.minimum(counts, (sure - evidence.window).clamp(min=0))
        first = rows.best(sure, most)
        worth = rows.scores
        if not evidence.adds_up:
            worth = selection.ranked(worth, view.pos, free)
        weighed = (worth + self.epsilon) * output_norms(view)
        rest = replace(rows, scores=weighed, free=free & ~first, counted=None)
        return first | selector.select(rest, counts - sure, most)

    differs = (
        "head budgets are those of the policy it is added to; kvpress has a variant of its own "
        "with Ada-KV's, where the score alone picks a head's own share, even if that is more "
        "than `by_score` of its tokens",
        "scores other than attention, such as a key's norm, count by their rank; the paper has "
        "none of these",
    )
