"""Random eviction: the baseline that every method should beat.

Draws are keyed by (seed, layer, head, tokens seen, position), so that layers and heads differ and
runs are reproducible.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minikv.policies import options
from minikv.policies.base import Evidence, PromptView, Scorer, StepPolicy, StepView
from minikv.policies.options import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomScorer(Scorer):
    """The score is a random number per row and head."""

    name = "random"
    summary = "a draw"

    sinks: int = options.sinks()
    recent: int = options.recent()
    seed: int = options.seed()

    @property
    def evidence(self) -> Evidence:
        return Evidence(sinks=self.sinks, window=self.recent)

    def score(self, view: PromptView) -> Tensor:
        return view.uniform(self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Random(StepPolicy):
    """Any unprotected row leaves before attention, each with the same probability."""

    sinks: int = options.sinks()
    recent: int = options.recent()
    seed: int = options.seed()
    name: str = "random"
    evict_first: bool = True

    def score(self, view: StepView) -> Tensor:
        return view.uniform(self.seed)


METHOD = Method(
    "random",
    "any token may leave; the floor that a method should beat",
    parts=(RandomScorer,),
    rule=Random,
    good="comparisons",
    paper="baseline",
)
