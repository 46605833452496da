"""RoCo (arXiv 2402.06262, section 4.2): evict the lowest mean attention among the steady rows.

Per row: the sum and the squared sum of the attention it got (mean over the query heads of its
group), and the number of queries that could see it. Rows whose attention varies most are out of
scope; of the rest, the one with the lowest mean leaves, one per head and step.
Departures from the release: each head has its own cap, the prompt's rows included; the first and
the newest rows are protected by position; the variance is clamped at 0, where rounding would make
a constant stream NaN; the scope never shrinks to nothing. The paper does not say what an answer
takes over from a prompt policy. Here a prompt's statistics are pooled over neighbouring rows
(`pool`), because those that a pooling prompt policy kept would leave first, and they count several
times (`lead`), so that rows of the answer leave before those that the question chose. With
`pool=1` and `lead=1` they are what the prompt's last queries gave, as if they were the answer's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minikv.kernels.dispatch import Kernels
from minikv.policies.base import PromptView, StepEnd, StepPolicy, StepView, unprotected


@dataclass(frozen=True, slots=True, kw_only=True)
class RoCo(StepPolicy):
    """`scope`: the share of a head's cap that a high deviation saves from eviction; `scope_prompt`:
    the same while a prompt is read in blocks. `pool`: of so many neighbours by position, a row of a
    prompt starts with the largest statistics (odd; 1: with its own). `lead`: what a row gets from a
    prompt's queries is worth so many times what it gets from an answer's."""

    sinks: int
    recent: int
    scope: float
    scope_prompt: float
    pool: int
    lead: float
    name: str = "roco"
    observe: int = 32

    def for_prefill(self) -> RoCo:
        return replace(self, scope=self.scope_prompt)

    @property
    def total(self) -> str:
        """The column of sums. As `sum`, H2O's scorer carries on from it, which it cannot where it
        is no plain sum of attention."""
        return "sum" if self.pool == 1 and self.lead == 1.0 else "weighed"

    @property
    def columns(self) -> dict[str, torch.dtype]:
        return {self.total: torch.float32, "squares": torch.float32, "count": torch.float32}

    def prompt(self, view: PromptView, old: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Carry on from the observation queries that the prompt has already been scored with."""
        assert view.mass is not None
        assert view.squares is not None
        first = view.position - view.observed
        able = (view.position - view.pos.clamp(min=first)).clamp(0, view.observed)
        count = (able if view.causal else view.live * view.observed).to(torch.float32)
        totals = torch.stack((view.mass.mean(1), view.squares))
        if self.pool > 1:
            # The last rows, those of the question as a rule, are not pooled, as in SnapKV.
            before = view.position - min(view.observed, self.observe)
            free = view.live & (view.pos < before)
            means = totals / count.clamp(min=1.0)
            means = view.ops.pool(means, view.pos, free, self.pool, "max")
            totals = torch.where(free, means * count, totals)
        return {
            self.total: old[self.total] + self.lead * totals[0],
            "squares": old["squares"] + self.lead**2 * totals[1],
            "count": old["count"] + count,
        }

    def update(
        self, columns: Mapping[str, Tensor], probabilities: Tensor, visible: Callable[[], Tensor]
    ) -> None:
        columns[self.total].add_(probabilities)
        columns["squares"].add_(probabilities * probabilities)
        columns["count"].add_(1.0)

    def score(self, view: StepView, count: int) -> tuple[Tensor, Tensor]:
        allowed = unprotected(view, self)
        seen = view.columns["count"].clamp(min=1.0)
        mean = view.columns[self.total] / seen
        variance = (view.columns["squares"] / seen - mean.square()).clamp(min=0.0)
        # The `keep` steadiest rows are in scope; protected rows count as unsteady.
        keep = torch.minimum(self.quota(view.cap).clamp(min=count), allowed.sum(1)).clamp(min=1)
        variance = variance.masked_fill(~allowed, torch.inf)
        if count > 1 or not view.readable:
            return mean, allowed & _steady(variance, keep)
        # Where numbers can be read, only the heads that need it are sorted.
        unsure = _unsure(mean.masked_fill(~allowed, torch.inf), variance, keep)
        if len(unsure):
            allowed[unsure] &= _steady(variance[unsure], keep[unsure])
        return mean, allowed

    def quota(self, cap: Tensor) -> Tensor:
        """How many rows of a head are in scope, int64 like `cap`."""
        return cap - (cap.to(torch.float64) * self.scope).to(torch.int64)

    def end_kernel(self, ops: Kernels, end: StepEnd) -> bool:
        if ops.roco_step is None:
            return False
        c = end.columns
        ops.roco_step(*end.heads, c[self.total], c["squares"], c["count"], end.quota)
        return True


def _steady(variance: Tensor, keep: Tensor) -> Tensor:
    """bool [F, N]: the keep [F] rows of a head that vary least, and those that vary as little."""
    return variance <= variance.sort(1).values.gather(1, keep[:, None] - 1)


def _unsure(mean: Tensor, variance: Tensor, keep: Tensor) -> Tensor:
    """int64 [U]: the heads whose row of lowest mean is out of scope, or not alone with this mean.

    In the others, nearly all, that row is the victim, and to know it needs no order of the
    variances.
    """
    lowest, found = mean.min(1, keepdim=True)
    steadier = (variance < variance.gather(1, found)).sum(1)
    return ((steadier >= keep) | ((mean == lowest).sum(1) != 1)).nonzero()[:, 0]
