"""Key norm (arXiv 2406.11430): rows whose key has a large norm leave; no attention is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.policies.base import (
    Evidence,
    PromptView,
    StepPolicy,
    StepView,
    ends,
    unprotected,
)


def norms(key: Tensor) -> Tensor:
    """float32 [..., N] of keys [..., N, D]; in lower precision many norms would be equal."""
    found: Tensor = torch.linalg.vector_norm(key, dim=-1, dtype=torch.float32)
    return found


def scorer(options: Mapping[str, object]) -> Evidence:
    """Minus the norm."""
    sinks, recent = options["sinks"], options["recent"]
    assert isinstance(sinks, int)
    assert isinstance(recent, int)
    return Evidence(
        lambda view: -norms(view.key()),
        ends(sinks, recent),
        sinks=sinks,
        window=recent,
        weighs=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class L2(StepPolicy):
    """The largest norm leaves before attention."""

    sinks: int
    recent: int
    name: str = "l2"
    evict_first: bool = True

    @property
    def columns(self) -> dict[str, torch.dtype]:
        return {"norm": torch.float32}

    def prompt(self, view: PromptView, old: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"norm": norms(view.key())}

    def init_state(self, layer: int, key: Tensor) -> dict[str, Tensor]:
        return {"norm": norms(key)}

    def score(self, view: StepView, count: int) -> tuple[Tensor, Tensor]:
        return -view.columns["norm"], unprotected(view, self)


def step_policy(options: Mapping[str, object]) -> L2:
    """Step form."""
    return L2(**options)  # type: ignore[arg-type]
