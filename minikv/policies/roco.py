"""RoCo (arXiv 2402.06262, section 4.2): evict the row with the lowest mean attention, among those
whose attention varies least.

Per row: the sum of the attention it got (mean over the query heads of its group), the sum of its
squares, and the number of queries that could see the row. Rows whose attention varies most do not
leave. Of the others, the one with the lowest mean leaves, one per head and step.

The paper does not say which statistics an answer starts with after a prompt policy. Here they are
those of the prompt's last queries, with two changes. They are pooled over neighbouring rows
(`pool`), because otherwise rows that a prompt policy kept because of their neighbours would leave
first. And they count several times (`lead`), so that rows of the answer leave before those that the
question chose. With `pool=1` and `lead=1`, the prompt's last queries count like the answer's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minikv.policies import options
from minikv.policies.base import Columns, PromptView, StepPolicy, StepView, Visible
from minikv.policies.options import Method, option
from minikv.policies.selection import pool


@dataclass(frozen=True, slots=True, kw_only=True)
class RoCo(StepPolicy):
    """Of the rows whose attention is steady, the one with the lowest mean leaves."""

    sinks: int = options.sinks()
    recent: int = options.recent(low=1)
    scope: float = option(
        0.3,
        "share of the budget for the tokens whose attention varies most; these stay",
        (0.0, 0.95),
    )
    scope_prompt: float = option(0.1, "`scope` while --stride reads a prompt", (0.0, 0.95))
    pool: int = option(
        7,
        "a prompt's tokens start with the largest statistics among this many neighbours (odd; 1: "
        "with their own)",
        (1, 63),
        odd=True,
    )
    lead: float = option(
        100.0,
        "attention from a prompt counts this many times as much as attention from the answer, so "
        "that the answer's tokens leave first (1: the same)",
        (1.0, 1e6),
    )
    name: str = "roco"
    observe: int = 32

    def for_prefill(self) -> RoCo:
        return replace(self, scope=self.scope_prompt)

    @property
    def total(self) -> str:
        """The name of the column of sums. H2O's scorer continues from a column "sum", so only a
        plain sum of attention has this name."""
        return "sum" if self.pool == 1 and self.lead == 1.0 else "weighed"

    @property
    def columns(self) -> dict[str, torch.dtype]:
        return {self.total: torch.float32, "squares": torch.float32, "count": torch.float32}

    def init(self, view: PromptView) -> dict[str, Tensor]:
        """Add the attention of the prompt's observed queries to the statistics."""
        assert view.squares is not None
        # The last rows, usually those of the question, are not pooled, as in SnapKV.
        before = view.position - min(view.observed, self.observe)
        count = view.able
        totals = torch.stack((view.mean, view.squares))
        if self.pool > 1:
            free = view.live & (view.pos < before)
            means = totals / count.clamp(min=1.0)
            means = pool(means, view.order, free, self.pool, "max")
            totals = torch.where(free, means * count, totals)
        old = view.carried
        return {
            self.total: old[self.total] + self.lead * totals[0],
            "squares": old["squares"] + self.lead**2 * totals[1],
            "count": old["count"] + count,
        }

    def update(self, columns: Columns, attention: Tensor, visible: Visible) -> None:
        columns[self.total].add_(attention)
        columns["squares"].add_(attention * attention)
        columns["count"].add_(1.0)

    def score(self, view: StepView) -> Tensor:
        seen = view.column("count").clamp(min=1.0)
        mean = view.column(self.total) / seen
        variance = (view.column("squares") / seen - mean.square()).clamp(min=0.0)
        variance = variance.masked_fill(~view.free, torch.inf)
        # The `few` free rows whose attention varies least may leave.
        quota = self.quota(view.cap)[:, None].clamp(min=view.count)
        few = torch.minimum(quota, view.free.sum(1, keepdim=True)).clamp(min=1)
        steady = variance <= variance.sort(1).values.gather(1, few - 1)
        return mean.masked_fill(~steady, torch.inf)

    def quota(self, cap: Tensor) -> Tensor:
        """How many rows of a head may leave: those whose attention varies least. int64, of the
        shape of `cap`."""
        return cap - (cap.to(torch.float64) * self.scope).to(torch.int64)

    differs = (
        "a head's budget counts the prompt's tokens; in the release they never leave and are not "
        "counted",
        "statistics begin with the last 32 queries of the prompt; the release begins with the "
        "first token of the answer",
        "those of the prompt are pooled over neighbours and count 100 times: short answers then "
        "show no loss compared to --decode none, which exceeds the budget; pool=1 and lead=1 "
        "count every query alike, as the paper does",
        "with --stride statistics begin with the first block; the release's begin with the first "
        "block over the budget (its keep_attention=False)",
        "the first 4 and the newest 10 tokens are protected by position; the paper protects none, "
        "and the release's protection fails for budgets below about 30",
        "what is left of the scope is at least one token, and a variance is at least 0; in the "
        "release rounding can make it NaN, which protects a token",
    )


METHOD = Method(
    "roco",
    "evicts the lowest mean attention among the tokens of steady attention",
    rule=RoCo,
    good="short answers",
    paper="2402.06262",
    told="mean and std of attention",
    state="2 sums and 1 count per token",
    again="fades",
)
