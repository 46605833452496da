"""RoCo (arXiv 2402.06262, section 4.2): evict the lowest mean attention among the steady rows.

Per row: the sum and the squared sum of the attention it got (mean over the query heads of its
group), and the number of queries that could see it. Rows whose attention varies most are out of
scope; of the rest, the one with the lowest mean leaves, one per head and step.
Departures from the release: each head has its own cap, the prompt's rows included; the first and
the newest rows are protected by position; the variance is clamped at 0, where rounding would make
a constant stream NaN; the scope never shrinks to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.policy import PromptView, StepView


@dataclass(frozen=True, slots=True)
class RoCo:
    """`scope` is the share of a head's cap that a high deviation saves from eviction."""

    sinks: int
    recent: int
    scope: float
    name: str = "roco"
    before: bool = False
    observe: int = 32

    @property
    def columns(self) -> dict[str, torch.dtype]:
        return {"sum": torch.float32, "squares": torch.float32, "count": torch.float32}

    def prompt(self, view: PromptView, old: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Carry on from the observation queries that the prompt has already been scored with."""
        assert view.mass is not None
        assert view.squares is not None
        first = view.position - view.observed
        able = (view.position - view.pos.clamp(min=first)).clamp(0, view.observed)
        return {
            "sum": old["sum"] + view.mass.mean(1),
            "squares": old["squares"] + view.squares,
            "count": old["count"] + able.to(torch.float32),
        }

    def step(self, columns: Mapping[str, Tensor], probabilities: Tensor) -> None:
        columns["sum"].add_(probabilities)
        columns["squares"].addcmul_(probabilities, probabilities)
        columns["count"].add_(1.0)

    def victims(self, view: StepView) -> Tensor:
        real = view.pos >= 0
        free = (view.pos >= self.sinks) & (view.pos < view.position - self.recent)
        # A cap smaller than sinks + recent would leave nothing to choose from: all but the newest.
        free |= ~free.any(1, keepdim=True) & real & (view.pos < view.position - 1)
        count = view.columns["count"].clamp(min=1.0)
        mean = view.columns["sum"] / count
        spread = (view.columns["squares"] / count - mean.square()).clamp(min=0.0)
        # The `keep` steadiest of all rows, protected ones counting as unsteady, are in scope.
        keep = view.cap - (view.cap.to(torch.float64) * self.scope).to(torch.int64)
        keep = torch.minimum(keep, free.sum(1)).clamp(min=1)
        spread = spread.masked_fill(~free, torch.inf)
        steady = spread.sort(1).values.gather(1, keep[:, None] - 1)
        mean = mean.masked_fill(~free | (spread > steady), torch.inf)
        lowest = mean.amin(1, keepdim=True)
        age = view.pos.masked_fill(mean > lowest, view.position + 1)
        return age.argmin(1)


def step_policy(options: Mapping[str, object]) -> RoCo:
    """RoCo as a row of the table."""
    sinks, recent, scope = options["sinks"], options["recent"], options["scope"]
    assert isinstance(sinks, int)
    assert isinstance(recent, int)
    assert isinstance(scope, float)
    return RoCo(sinks, recent, scope)
