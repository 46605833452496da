"""RoCo (arXiv 2402.06262, section 4.2): evict the lowest mean attention among the steady rows.

Per row: the sum and the squared sum of the attention it got (mean over the query heads of its
group), and the number of queries that could see it. Rows whose attention varies most are out of
scope; of the rest, the one with the lowest mean leaves, one per head and step.
Departures from the release: each head has its own cap, the prompt's rows included; the first and
the newest rows are protected by position; the variance is clamped at 0, where rounding would make
a constant stream NaN; the scope never shrinks to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minikv.policies.base import PromptView, StepPolicy, StepView, oldest_of_lowest, unprotected


@dataclass(frozen=True, slots=True, kw_only=True)
class RoCo(StepPolicy):
    """`scope`: the share of a head's cap that a high deviation saves from eviction; `scope_prompt`:
    the same while a prompt is read in blocks."""

    sinks: int
    recent: int
    scope: float
    scope_prompt: float
    name: str = "roco"
    observe: int = 32

    def reader(self) -> RoCo:
        return replace(self, scope=self.scope_prompt)

    @property
    def columns(self) -> dict[str, torch.dtype]:
        return {"sum": torch.float32, "squares": torch.float32, "count": torch.float32}

    def prompt(self, view: PromptView, old: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Carry on from the observation queries that the prompt has already been scored with."""
        assert view.mass is not None
        assert view.squares is not None
        first = view.position - view.observed
        able = (view.position - view.pos.clamp(min=first)).clamp(0, view.observed)
        count = able if view.causal else view.live * view.observed
        return {
            "sum": old["sum"] + view.mass.mean(1),
            "squares": old["squares"] + view.squares,
            "count": old["count"] + count.to(torch.float32),
        }

    def step(
        self, columns: Mapping[str, Tensor], probabilities: Tensor, visible: Callable[[], Tensor]
    ) -> None:
        columns["sum"].add_(probabilities)
        columns["squares"].addcmul_(probabilities, probabilities)
        columns["count"].add_(1.0)

    def judge(self, view: StepView, count: int) -> tuple[Tensor, Tensor]:
        free, mean, spread, keep = self._evidence(view, count)
        return mean, free & _steady(spread, keep)

    def victims(self, view: StepView) -> Tensor:
        """As by `judge`. The row of lowest mean is nearly always steady, and to know that needs no
        sorting; only the other heads are sorted."""
        free, mean, spread, keep = self._evidence(view, 1)
        low = mean.masked_fill(~free, torch.inf)
        found = low.argmin(1, keepdim=True)
        sure = (spread < spread.gather(1, found)).sum(1) < keep
        sure &= (low == low.gather(1, found)).sum(1) == 1
        chosen = found[:, 0]
        left = (~sure).nonzero()[:, 0]
        if len(left):
            scope = free[left] & _steady(spread[left], keep[left])
            chosen[left] = oldest_of_lowest(mean[left], view.pos[left], scope)
        return chosen

    def _evidence(self, view: StepView, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Free rows, mean, variance (infinite where not free), and how many rows are in scope."""
        free = unprotected(view, self)
        seen = view.columns["count"].clamp(min=1.0)
        mean = view.columns["sum"] / seen
        spread = (view.columns["squares"] / seen - mean.square()).clamp(min=0.0)
        # The `keep` steadiest of all rows, protected ones counting as unsteady, are in scope.
        keep = view.cap - (view.cap.to(torch.float64) * self.scope).to(torch.int64)
        keep = torch.minimum(keep.clamp(min=count), free.sum(1)).clamp(min=1)
        return free, mean, spread.masked_fill(~free, torch.inf), keep


def _steady(spread: Tensor, keep: Tensor) -> Tensor:
    """bool [F, N]: the keep [F] rows that vary least, and those that vary as little."""
    return spread <= spread.sort(1).values.gather(1, keep[:, None] - 1)


def step_policy(options: Mapping[str, object]) -> RoCo:
    """RoCo as a row of the table."""
    sinks, recent = options["sinks"], options["recent"]
    scope, reading = options["scope"], options["scope_prompt"]
    assert isinstance(sinks, int)
    assert isinstance(recent, int)
    assert isinstance(scope, float)
    assert isinstance(reading, float)
    return RoCo(sinks=sinks, recent=recent, scope=scope, scope_prompt=reading)
