"""TOVA (arXiv 2401.06104): the rows that the newest query attends to least leave.

Layer-wise, as published: attention is averaged over all heads of a layer, so heads that hold the
same rows evict the same one. With `per_head` each KV head uses only its own attention. Departure:
the newest row is protected; the release evicts it if its own attention is the lowest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.kernels.dispatch import Kernels
from minikv.policies.base import (
    BlockEnd,
    Evidence,
    PromptView,
    Scorer,
    StepEnd,
    StepPolicy,
    StepView,
    unprotected,
)


def layer_mean(values: Tensor, pos: Tensor, layer: Tensor) -> Tensor:
    """Mean of `values` [F, N] over the heads of a layer that hold the same position.

    pos [F, N]: -1 where there is no row. layer [F]: the heads of a layer are side by side. The mean
    is over the heads that hold a row of this position. Where pos is -1 the result has no meaning.
    """
    key = (layer[:, None] << 40 | (pos + 1)).flatten()
    ordered, order = key.sort(stable=True)
    new = torch.cat((ordered.new_zeros(1), (ordered[1:] != ordered[:-1]).long()))
    same = torch.empty_like(order).scatter_(0, order, new.cumsum(0))
    sums = torch.zeros(len(key), dtype=torch.float64, device=values.device)
    sums.scatter_add_(0, same, values.flatten().to(torch.float64))
    counts = torch.zeros_like(sums).scatter_add_(0, same, torch.ones_like(sums))
    return (sums / counts).gather(0, same).view(values.shape).to(values.dtype)


def heads_mean(values: Tensor, pos: Tensor, end: int) -> Tensor:
    """float32 [H, N]: the mean of `values` float32 over the heads of a layer that hold a row of the
    same position.

    pos int64 [H, N], below `end`; -1 for no row, where the result has no meaning.
    """
    place = pos + 1
    table = torch.zeros((2, len(pos), end + 1), dtype=torch.float64, device=values.device)
    table[0].scatter_(1, place, values.to(torch.float64))  # then added in a fixed order
    table[1].scatter_(1, place, 1.0)
    sums = table.sum(1)
    return (sums[0, place] / sums[1, place]).to(values.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class TovaScorer(Scorer):
    """The score is the attention of the prompt's last query."""

    per_head: bool
    protect_newest: bool

    @property
    def evidence(self) -> Evidence:
        return Evidence(observe=1, asks=True, window=int(self.protect_newest))

    def score(self, view: PromptView) -> Tensor:
        assert view.mass is not None
        mean = view.mass.mean(1)
        return mean if self.per_head else heads_mean(mean, view.pos, view.position)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tova(StepPolicy):
    """The row with the least attention in this step leaves. Stores no columns."""

    per_head: bool
    protect_newest: bool
    sinks: int
    name: str = "tova"
    needs_attention: bool = True

    @property
    def recent(self) -> int:  # type: ignore[override]
        return int(self.protect_newest)

    def score(self, view: StepView, count: int | Tensor) -> tuple[Tensor, Tensor]:
        assert view.attention is not None
        mean = view.attention
        if not self.per_head:
            mean = layer_mean(mean, view.pos, view.layer)
        return mean, unprotected(view, self)

    def block_kernel(self, ops: Kernels, block: BlockEnd) -> tuple[Tensor, Tensor] | None:
        if ops.unprotected_block is None or block.attention is None:
            return None
        mean = block.attention
        if not self.per_head:
            mean = heads_mean(mean, block.pos, block.position)
        return ops.unprotected_block(mean, *block.heads(self))

    def end_kernel(self, ops: Kernels, end: StepEnd) -> bool:
        if ops.tova_step is None:
            return False
        ops.tova_step(*end.heads, layerwise=not self.per_head)
        return True
