"""StreamingLLM (arXiv 2309.17453): the first rows, on which attention rests, and the last ones.

Departure: the paper re-numbers positions inside the cache at every step; here keys keep their
position, which makes it a sliding window with sinks and does not extend the context.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minikv.kernels.dispatch import Kernels
from minikv.policies.base import (
    Evidence,
    PromptView,
    Scorer,
    StepPolicy,
    StepRoom,
    StepView,
    unprotected,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingScorer(Scorer):
    """Sinks by position, then recency."""

    sinks: int

    @property
    def evidence(self) -> Evidence:
        return Evidence(sinks=self.sinks, adds_up=False)

    def score(self, view: PromptView) -> Tensor:
        return view.pos.float()


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming(StepPolicy):
    """The oldest row that is no sink leaves before attention; of a head that has none but sinks, as
    a budget per head may leave it, the youngest."""

    sinks: int
    name: str = "streaming"
    evict_first: bool = True
    needs_query: bool = False
    recent: int = 0

    def score(self, view: StepView, count: int) -> tuple[Tensor, Tensor]:
        age = view.pos.float()
        return age.where(view.pos >= self.sinks, -age), unprotected(view, self)

    def room_kernel(self, ops: Kernels, room: StepRoom) -> bool:
        if ops.streaming_step is None:
            return False
        ops.streaming_step(*room.heads)
        return True
