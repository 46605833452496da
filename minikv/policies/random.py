"""Random eviction: the baseline that every method should beat.

Draws are keyed by (seed, layer, head, tokens seen, position), so that layers and heads differ and a
run can be repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minikv.kernels.dispatch import Kernels
from minikv.policies.base import (
    BlockEnd,
    Evidence,
    PromptView,
    Scorer,
    StepPolicy,
    StepRoom,
    StepView,
    unprotected,
)
from minikv.policies.counter_rng import row_uniform, uniform


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomScorer(Scorer):
    """The score is a random number per row and head."""

    sinks: int
    recent: int
    seed: int

    @property
    def evidence(self) -> Evidence:
        return Evidence(sinks=self.sinks, window=self.recent)

    def score(self, view: PromptView) -> Tensor:
        return row_uniform(self.seed, view.layer, view.position, view.pos)


@dataclass(frozen=True, slots=True, kw_only=True)
class Random(StepPolicy):
    """Any unprotected row leaves before attention, each with the same probability."""

    sinks: int
    recent: int
    seed: int
    name: str = "random"
    evict_first: bool = True
    needs_query: bool = False

    def score(self, view: StepView, count: int | Tensor) -> tuple[Tensor, Tensor]:
        drawn = uniform(self.seed, view.layer[:, None], view.head[:, None], view.position, view.pos)
        return drawn, unprotected(view, self)

    def block_kernel(self, ops: Kernels, block: BlockEnd) -> tuple[Tensor, Tensor] | None:
        if ops.unprotected_block is None:
            return None
        drawn = row_uniform(self.seed, block.layer, block.position, block.pos)
        return ops.unprotected_block(drawn, *block.heads(self))

    def room_kernel(self, ops: Kernels, room: StepRoom) -> bool:
        if ops.random_step is None:
            return False
        ops.random_step(*room.heads, self.seed)
        return True
