"""StreamingLLM (arXiv 2309.17453): the first rows, on which attention rests, and the last ones.

Departure: the paper re-numbers positions inside the cache at every step; here keys keep their
position, which makes it a sliding window with sinks and does not extend the context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.policy import PromptPolicy, PromptView, StepView, even_heads, even_layers, top


def prompt_policy(options: Mapping[str, object]) -> PromptPolicy:
    """One-shot form: sinks by position, then recency."""
    sinks = options["sinks"]
    assert isinstance(sinks, int)

    def scope(view: PromptView) -> Tensor:
        return view.live & (view.pos < sinks)

    return PromptPolicy(
        "streaming", _recency, scope, even_heads, even_layers, top, sinks=sinks
    )


def _recency(view: PromptView) -> Tensor:
    return view.pos.float()


@dataclass(frozen=True, slots=True)
class Streaming:
    """Step form: the oldest row that is no sink leaves before attention."""

    sinks: int
    name: str = "streaming"
    before: bool = True
    recent: int = 0
    observe: int = 0

    @property
    def columns(self) -> dict[str, torch.dtype]:
        return {}

    def prompt(self, view: PromptView, old: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {}

    def step(self, columns: Mapping[str, Tensor], probabilities: Tensor) -> None:
        """Positions are all the evidence there is."""

    def victims(self, view: StepView) -> Tensor:
        free = view.pos >= self.sinks
        return view.pos.masked_fill(~free, view.position + 1).argmin(1)


def step_policy(options: Mapping[str, object]) -> Streaming:
    """Step form."""
    sinks = options["sinks"]
    assert isinstance(sinks, int)
    return Streaming(sinks)
