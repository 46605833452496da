"""TOVA (arXiv 2401.06104): the rows that the newest query attends to least leave.

Layer-wise, as published: attention is averaged over all heads of a layer, so heads that hold the
same rows evict the same one. With `per_head` each KV head uses only its own attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from minikv.policies import options
from minikv.policies.base import Evidence, PromptView, Scorer, StepPolicy, StepView
from minikv.policies.options import Method, option


def layer_mean(values: Tensor, pos: Tensor, heads: int, context: int) -> Tensor:
    """Mean of `values` [F, N] over the heads of a layer that hold the same position.

    pos int64 [F, N]: -1 where there is no row, otherwise below `context`. The `heads` heads of a
    layer are adjacent. Where pos is -1 the result is undefined.
    """
    at = pos.reshape(-1, heads * pos.shape[1]) + 1
    sums = torch.zeros((len(at), context + 1), dtype=torch.float64, device=values.device)
    counts = torch.zeros(sums.shape, device=values.device)
    own = values.to(torch.float64).reshape(at.shape)
    sums.scatter_add_(1, at, own)
    counts.scatter_add_(1, at, counts.new_ones(1).expand(at.shape))
    mean = sums.gather(1, at) / counts.gather(1, at)
    return mean.view(pos.shape).to(values.dtype)


_protect_newest = partial(option, True, "the newest token stays (the release lets it go)")
_per_head = partial(
    option, False, "average attention in each KV head, not over all heads of a layer"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TovaScorer(Scorer):
    """The score is the attention of the prompt's last query."""

    name = "tova"
    summary = "the last query's attention"

    per_head: bool = _per_head()
    protect_newest: bool = _protect_newest()

    @property
    def evidence(self) -> Evidence:
        return Evidence(observe=1, asks=True, window=int(self.protect_newest))

    def score(self, view: PromptView) -> Tensor:
        mean = view.mean
        return mean if self.per_head else layer_mean(mean, view.pos, len(mean), view.position)

    differs = (
        "the newest token stays; the release lets it go if it attends to itself least "
        "(`protect_newest`)",
        "if the heads of a layer hold different tokens, the mean is over those that hold a "
        "token; the release always evicts the same in all",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tova(StepPolicy):
    """The row with the least attention in this step leaves. Stores no columns."""

    per_head: bool = _per_head()
    protect_newest: bool = _protect_newest()
    sinks: int = options.sinks(0)
    name: str = "tova"

    @property
    def recent(self) -> int:  # type: ignore[override]
        return int(self.protect_newest)

    def score(self, view: StepView) -> Tensor:
        assert view.attention is not None
        if self.per_head:
            return view.attention
        return layer_mean(view.attention, view.pos, view.heads, view.context)


METHOD = Method(
    "tova",
    "the tokens that the newest query attends to least leave",
    parts=(TovaScorer,),
    rule=Tova,
    good="long answers",
    paper="2401.06104",
)
