"""CriticalKV (arXiv 2502.03805, algorithm 1): what a row would add to the output counts, too.

Half of a head's rows are the best by score; the rest are judged by the score times the length of
what the value becomes behind the output projection, |v W_O|_1, mean over the group's query heads.
Any selector may choose those. Where scores are no weights (a key's norm), their ranks are taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minikv.policies import selection
from minikv.policies.base import Candidates, Reweighter, Selector
from minikv.policies.outputs import output_norms


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalKV(Reweighter):
    """The share `by_score` of a head's rows goes to the scores alone. The window's rows are kept
    anyway and count in that share."""

    by_score: float
    epsilon: float

    def select(self, rows: Candidates, counts: Tensor, most: int, selector: Selector) -> Tensor:
        view, free, evidence = rows.view, rows.free, rows.scorer.evidence
        sure = ((counts + evidence.window).to(torch.float64) * self.by_score).to(torch.int64)
        sure = torch.minimum(counts, (sure - evidence.window).clamp(min=0))
        first = view.ops.best(rows.scores, view.pos, free, sure, most)
        worth = rows.scores
        if not evidence.adds_up:
            worth = selection.ranked(worth, view.pos, free)
        weighed = (worth + self.epsilon) * output_norms(view)
        rest = replace(rows, scores=weighed, free=free & ~first, counted=None)
        return first | selector.select(rest, counts - sure, most)
