"""Key norm (arXiv 2406.11430): rows whose key has a large norm leave; no attention is needed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.policies import options
from minikv.policies.base import Evidence, PromptView, Scorer, StepPolicy, StepView
from minikv.policies.options import Method, option


def norms(key: Tensor) -> Tensor:
    """float32 [..., N]: the norms of keys [..., N, D]. In lower precision many of them would be
    equal."""
    found: Tensor = torch.linalg.vector_norm(key, dim=-1, dtype=torch.float32)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class L2Scorer(Scorer):
    """The score is minus the norm. The first `skip` layers keep all rows, in excess of the
    budget."""

    name = "l2"
    summary = "small key norm"

    sinks: int = options.sinks()
    recent: int = options.recent()
    skip: int = option(
        0, "how many first layers keep every token, above the budget (the release: 2)", (0, 4096)
    )

    @property
    def evidence(self) -> Evidence:
        return Evidence(
            sinks=self.sinks, window=self.recent, adds_up=False, whole_layers=self.skip, copies="k"
        )

    def score(self, view: PromptView) -> Tensor:
        return -norms(view.key())

    differs = (
        "the first 4 and the newest 10 tokens stay; kvpress and KVCache-Factory protect none "
        "(`sinks`, `recent`)",
        "norms are float32; in the model's precision many are equal",
        "evicts in every layer; the release evicts nothing in the first two (`skip`)",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class L2(StepPolicy):
    """The row with the largest norm leaves, before attention. With keys in int8, the norm of a row
    written by a step is that of the stored key, as for a later prompt."""

    sinks: int = options.sinks()
    recent: int = options.recent()
    name: str = "l2"
    evict_first: bool = True

    @property
    def columns(self) -> dict[str, torch.dtype]:
        return {"norm": torch.float32}

    def of_key(self, layer: int, key: Tensor) -> dict[str, Tensor]:
        return {"norm": norms(key)}

    def score(self, view: StepView) -> Tensor:
        return -view.column("norm")


METHOD = Method(
    "l2",
    "tokens whose key has a large norm leave; reads no attention",
    parts=(L2Scorer,),
    rule=L2,
    good="comparisons",
    paper="2406.11430",
    state="1 norm per token",
)
