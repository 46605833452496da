"""RoCo (arXiv 2402.06262, section 4.2): evict the row with the lowest mean attention, among those
whose attention varies least.

Per row: the sum of the attention it got (mean over the query heads of its group), the sum of its
squares, and the number of queries that could see the row. Rows whose attention varies most do not
leave. Of the others, the one with the lowest mean leaves, one per head and step.

Departures from the release: each head has its own cap, the prompt's rows included; the first and
the newest rows are protected by position; the variance is clamped at 0, because rounding can make
that of constant attention negative and the release's deviation NaN; at least one row may always
leave.

The paper does not say with which statistics an answer starts after a prompt policy. Here they are
those of the prompt's last queries, with two changes. They are pooled over neighbouring rows
(`pool`), because rows that a prompt policy kept for their neighbours' sake would otherwise leave
first. And they count several times (`lead`), so that rows of the answer leave before those that the
question chose. With `pool=1` and `lead=1`, the prompt's last queries count like the answer's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minikv.kernels.dispatch import Kernels
from minikv.policies.base import BlockEnd, PromptView, StepEnd, StepPolicy, StepView, unprotected
from minikv.policies.selection import pool


@dataclass(frozen=True, slots=True, kw_only=True)
class RoCo(StepPolicy):
    """scope: the share of a head's cap for the rows whose attention varies most; these stay.
    scope_prompt: the same while a prompt is read in blocks. pool: a prompt's row starts with the
    largest means among so many neighbours by position (odd; 1: its own). lead: attention from
    a prompt's query counts so many times as much as from an answer's."""

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
        """The name of the column of sums. H2O's scorer continues from a column "sum", so only a
        plain sum of attention has this name."""
        return "sum" if self.pool == 1 and self.lead == 1.0 else "weighed"

    @property
    def columns(self) -> dict[str, torch.dtype]:
        return {self.total: torch.float32, "squares": torch.float32, "count": torch.float32}

    def prompt(self, view: PromptView, old: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add the attention of the prompt's observed queries to the statistics."""
        assert view.mass is not None
        assert view.squares is not None
        # The last rows, usually those of the question, are not pooled, as in SnapKV.
        before = view.position - min(view.observed, self.observe)
        first = view.position - view.observed
        able = (view.position - view.pos.clamp(min=first)).clamp(0, view.observed)
        count = (able if view.causal else view.live * view.observed).to(torch.float32)
        totals = torch.stack((view.mass.mean(1), view.squares))
        if self.pool > 1:
            free = view.live & (view.pos < before)
            means = totals / count.clamp(min=1.0)
            means = pool(means, view.order, free, self.pool, "max")
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

    def update_block(
        self,
        ops: Kernels,
        columns: Mapping[str, Tensor],
        probabilities: Tensor,
        visible: Callable[[], Tensor],
    ) -> None:
        ops.add_queries(probabilities, columns[self.total], columns["squares"], columns["count"])

    def score(self, view: StepView, count: int | Tensor) -> tuple[Tensor, Tensor]:
        allowed = unprotected(view, self)
        seen = view.columns["count"].clamp(min=1.0)
        mean = view.columns[self.total] / seen
        variance = (view.columns["squares"] / seen - mean.square()).clamp(min=0.0)
        # The `few` allowed rows whose attention varies least may leave.
        few = torch.minimum(self.quota(view.cap).clamp(min=count), allowed.sum(1)).clamp(min=1)
        variance = variance.masked_fill(~allowed, torch.inf)
        if not view.readable or count > 1:
            return mean, allowed & _steady(variance, few)
        # If values can be read, only the heads that need it are sorted.
        unsure = _unsure(mean.masked_fill(~allowed, torch.inf), variance, few)
        if len(unsure):
            allowed[unsure] &= _steady(variance[unsure], few[unsure])
        return mean, allowed

    def quota(self, cap: Tensor) -> Tensor:
        """How many rows of a head may leave: those whose attention varies least. int64, of the
        shape of `cap`."""
        return cap - (cap.to(torch.float64) * self.scope).to(torch.int64)

    def block_kernel(self, ops: Kernels, block: BlockEnd) -> tuple[Tensor, Tensor] | None:
        if ops.roco_block is None or block.quota is None:
            return None
        c = block.columns
        noted = c[self.total], c["squares"], c["count"]
        return ops.roco_block(*noted, block.quota, *block.heads(self))

    def end_kernel(self, ops: Kernels, end: StepEnd) -> bool:
        if ops.roco_step is None:
            return False
        c = end.columns
        ops.roco_step(*end.heads, c[self.total], c["squares"], c["count"], end.quota)
        return True


def _steady(variance: Tensor, keep: Tensor) -> Tensor:
    """bool [F, N]: the `keep` [F] rows of each head whose attention varies least, with all that are
    equal to the last of them."""
    return variance <= variance.sort(1).values.gather(1, keep[:, None] - 1)


def _unsure(mean: Tensor, variance: Tensor, keep: Tensor) -> Tensor:
    """int64 [U]: the heads whose row of the lowest mean is not among the `keep` that vary least, or
    shares its mean with another row.

    In the other heads, which are nearly all, that row is the victim, so variances need not be
    sorted.
    """
    lowest, found = mean.min(1, keepdim=True)
    steadier = (variance < variance.gather(1, found)).sum(1)
    return ((steadier >= keep) | ((mean == lowest).sum(1) != 1)).nonzero()[:, 0]
