"""Key norm (arXiv 2406.11430): rows whose key has a large norm leave; no attention is needed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.policies.base import Evidence, PromptView, Scorer, StepPolicy, StepView, protect


def norms(key: Tensor) -> Tensor:
    """float32 [..., N]: the norms of keys [..., N, D]. In lower precision many of them would be
    equal."""
    found: Tensor = torch.linalg.vector_norm(key, dim=-1, dtype=torch.float32)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class L2Scorer(Scorer):
    """The score is minus the norm. The first `skip` layers keep all rows, above the budget."""

    sinks: int
    recent: int
    skip: int

    @property
    def evidence(self) -> Evidence:
        return Evidence(sinks=self.sinks, window=self.recent, adds_up=False, whole_layers=self.skip)

    def score(self, view: PromptView) -> Tensor:
        return -norms(view.key())


@dataclass(frozen=True, slots=True, kw_only=True)
class L2(StepPolicy):
    """The row with the largest norm leaves, before attention. With keys in int8, the norm of a row
    that a step wrote is that of the key as it is stored, as a later prompt computes it, too."""

    sinks: int
    recent: int
    name: str = "l2"
    evict_first: bool = True

    @property
    def columns(self) -> dict[str, torch.dtype]:
        return {"norm": torch.float32}

    def of_key(self, layer: int, key: Tensor) -> dict[str, Tensor]:
        return {"norm": norms(key)}

    def score(self, view: StepView, count: int | Tensor) -> Tensor:
        return protect(-view.columns["norm"], view, self)
