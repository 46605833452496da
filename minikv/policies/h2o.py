"""H2O (arXiv 2306.14048, section 4): the rows with the most accumulated attention and the newest
stay.

A row's worth is the sum of all attention that it got (mean over the query heads of its group), from
all queries of the prompt. Half of a head's rows are the newest ones, as in the paper. At a later
prompt, earlier attention counts only if the step policy has a `sum` column (h2o, or roco with
`pool=1` and `lead=1`) and `average` is off. Otherwise only the later prompt's own queries count.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from minikv.policies import options
from minikv.policies.base import (
    ALL,
    Columns,
    Evidence,
    PromptView,
    Scorer,
    StepPolicy,
    StepView,
    Visible,
)
from minikv.policies.options import Method, option

_recent_share = partial(option, 0.5, "share of a head's tokens that are the newest", (0.0, 0.95))


@dataclass(frozen=True, slots=True, kw_only=True)
class H2OScorer(Scorer):
    """The sum over all queries of the prompt, added to the row's earlier sum. The newest rows
    always stay."""

    name = "h2o"
    summary = "attention of all queries, summed"

    recent_share: float = _recent_share()
    sinks: int = options.sinks(0)
    window: int = option(
        0, "how many newest tokens stay, instead of `recent_share`; 0: use the share", (0, 4096)
    )
    average: bool = option(
        False,
        "divide by the number of queries that could see a token, so that old tokens have no "
        "advantage (kvpress' observed attention)",
    )

    @property
    def evidence(self) -> Evidence:
        return Evidence(observe=ALL, asks=True, sinks=self.sinks, window=self.window)

    def score(self, view: PromptView) -> Tensor:
        sums = view.mean
        if self.average:
            return sums / view.able.clamp(min=1.0)
        return sums + view.carried["sum"] if "sum" in view.carried else sums

    def protected(self, view: PromptView) -> tuple[int, int]:
        room = max(0, view.budget - self.sinks - 1)  # leaves at least one row to choose
        return self.sinks, self.window or min(int(view.budget * self.recent_share), room)

    differs = (
        "a KV head is judged by the mean of its query heads; the release fails if there are "
        "fewer KV heads",
        "follows the release's cache that evicts; the paper's figures come from one that only "
        "masks, with budgets that are shares of the prompt",
        "KVCache-Factory protects a fixed window (`window`); kvpress divides by age (`average`) "
        "and protects nothing (`recent_share`)",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class H2O(StepPolicy):
    """The row with the smallest sum leaves. The newest rows never do: the share `recent_share` of a
    head's cap."""

    recent_share: float = _recent_share()
    sinks: int = options.sinks(0)
    name: str = "h2o"
    observe: int = 32

    @property
    def columns(self) -> dict[str, torch.dtype]:
        return {"sum": torch.float32}

    def init(self, view: PromptView) -> dict[str, Tensor]:
        """Start from the sums over the queries that were observed at the end of the prompt."""
        return {"sum": view.carried["sum"] + view.mean}

    def update(self, columns: Columns, attention: Tensor, visible: Visible) -> None:
        columns["sum"].add_(attention)

    def score(self, view: StepView) -> Tensor:
        rows = (view.pos >= 0).sum(1, keepdim=True)
        newest = torch.minimum(self.quota(view.cap)[:, None], rows - view.count).clamp(min=1)
        edge = view.pos.sort(1, descending=True).values.gather(1, newest - 1)
        older = view.free & (view.pos < edge)
        enough = older.sum(1, keepdim=True) >= view.count
        return view.column("sum").masked_fill(enough & ~older, torch.inf)

    def quota(self, cap: Tensor) -> Tensor:
        """int64, of the shape of `cap`: how many of a head's rows are protected as the newest."""
        return (cap.to(torch.float64) * self.recent_share).to(torch.int64).clamp(min=1)

    differs = (
        "after another prompt policy its sums begin with the queries which that one reads, 32 at "
        "least; the paper sums over all of the prompt",
    )


METHOD = Method(
    "h2o",
    "tokens with the most accumulated attention, and the newest; attention from before a later "
    "prompt counts there only with --decode h2o",
    parts=(H2OScorer,),
    rule=H2O,
    good="long answers",
    paper="2306.14048",
    state="1 sum per token",
    again="fades",
)
