"""StreamingLLM (arXiv 2309.17453): the first rows (attention sinks) and the last ones stay.

Keys keep their positions, so this is a sliding window with sinks and does not extend the context.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minikv.policies import options
from minikv.policies.base import Evidence, PromptView, Scorer, StepPolicy, StepView
from minikv.policies.options import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingScorer(Scorer):
    """The score is the position; sinks are protected."""

    name = "streaming"
    summary = "position only"

    sinks: int = options.sinks()

    @property
    def evidence(self) -> Evidence:
        return Evidence(sinks=self.sinks, adds_up=False)

    def score(self, view: PromptView) -> Tensor:
        return view.pos.float()

    differs = (
        "keys keep their positions; paper and release renumber them inside the cache at "
        "every step, which also extends the context",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming(StepPolicy):
    """The oldest row that is not a sink leaves, before attention. If a head has only sinks, which a
    small head budget can cause, the youngest one leaves."""

    sinks: int = options.sinks()
    name: str = "streaming"
    evict_first: bool = True
    recent: int = 0

    def score(self, view: StepView) -> Tensor:
        age = view.pos.float()
        return age.where(view.pos >= self.sinks, -age)


METHOD = Method(
    "streaming",
    "the first tokens (sinks) and the most recent ones; keys keep their positions, so the trained "
    "context is not extended",
    parts=(StreamingScorer,),
    rule=Streaming,
    good="the newest text",
    paper="2309.17453",
    again="recent only",
)
