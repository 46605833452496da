"""CriticalKV (arXiv 2502.03805, algorithm 1): what a row would add to the output counts, too.

Half of a head's rows are the best by score; the rest are judged by the score times the length of
what the value becomes behind the output projection, |v W_O|_1, mean over the group's query heads.
Any selector may choose those. Where scores are no weights (a key's norm), their ranks are taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from minikv.policies import selection
from minikv.policies.base import DeviceSelector, Evidence, PromptView, Selector, best, ranked

_ROWS = 4096  # rows projected at once


def value_norms(view: PromptView) -> Tensor:
    """float32 [H, N]: the L1 length of every value behind W_O, mean over the group."""
    assert view.output is not None, "the network's output projection is not known"
    value, matrix = view.value(), view.output()
    norms = torch.zeros(value.shape[:2], device=value.device)
    for h in range(len(value)):
        for lo in range(0, value.shape[1], _ROWS):
            rows = value[h, lo : lo + _ROWS].float()
            for one in matrix[h]:  # [D, hidden]
                norms[h, lo : lo + _ROWS] += (rows @ one.float()).abs().sum(-1)
    return norms / matrix.shape[1]


def weigh(options: Mapping[str, object], evidence: Evidence, select: Selector) -> Selector:
    """`select`, after a share of the rows went to the scores alone, by what values weigh.

    The window's rows are kept anyway and count in that share.
    """
    window, first = evidence.window, options["by_score"]
    assert isinstance(first, float)

    def choose(view: PromptView, scores: Tensor, free: Tensor, counts: Sequence[int]) -> Tensor:
        by_score = torch.zeros_like(free)
        left = []
        for h, count in enumerate(counts):
            sure = min(count, max(0, int((count + window) * first) - window))
            by_score[h] = best(scores[h], view.pos[h], free[h], sure)
            left.append(count - sure)
        weighed = _weighed(options, evidence, view, scores, free)
        return by_score | select(view, weighed, free & ~by_score, left)

    return choose


def device_weigh(
    options: Mapping[str, object], evidence: Evidence, select: DeviceSelector
) -> DeviceSelector:
    """`weigh` where the scores are."""
    window, first = evidence.window, options["by_score"]
    assert isinstance(first, float)

    def choose(view: PromptView, scores: Tensor, free: Tensor, counts: Tensor, most: int) -> Tensor:
        sure = ((counts + window).to(torch.float64) * first).to(torch.int64) - window
        sure = torch.minimum(counts, sure.clamp(min=0))
        by_score = selection.best(scores, view.pos, free, sure, most)
        weighed = _weighed(options, evidence, view, scores, free)
        return by_score | select(view, weighed, free & ~by_score, counts - sure, most)

    return choose


def _weighed(
    options: Mapping[str, object],
    evidence: Evidence,
    view: PromptView,
    scores: Tensor,
    free: Tensor,
) -> Tensor:
    epsilon = options["epsilon"]
    assert isinstance(epsilon, float)
    worth = scores if evidence.weighs else ranked(scores, view.pos, free)
    return (worth + epsilon) * value_norms(view)
