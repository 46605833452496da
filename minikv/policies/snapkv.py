"""SnapKV (arXiv 2404.14469, section 4): the rows that the last window of the prompt attends to.

The attention of the last W queries is averaged over the window and the query heads of a group,
pooled over neighbouring rows, and the best rows of each KV head stay beside the window itself.
Departures from the release: one kept set per KV head, not per query head, so that grouped-query
models really free memory; float32 throughout; the mean over the group comes before pooling;
an even share of the budget includes the window; max pooling of 7, as in the published runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.policies.base import Evidence, PromptView, Scorer


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapKV(Scorer):
    """Pooled mean attention of the window's queries; the window's own rows all stay."""

    window: int
    kernel: int
    pooling: str
    group: str
    sinks: int

    @property
    def evidence(self) -> Evidence:
        return Evidence(observe=self.window, asks=True, sinks=self.sinks, window=self.window)

    def score(self, view: PromptView) -> Tensor:
        assert view.mass is not None
        scores = join_group(view.mass / view.observed, self.group)
        free = self.free(view)
        return pool(scores, view.pos, free, self.kernel, self.pooling)


def join_group(mass: Tensor, how: str) -> Tensor:
    """[H, G, N] -> [H, N]: join the query heads of each KV head by mean, sum or max."""
    if how == "max":
        return mass.amax(1)
    return mass.sum(1) if how == "sum" else mass.mean(1)


def pool(scores: Tensor, pos: Tensor, free: Tensor, kernel: int, how: str) -> Tensor:
    """Pool each head's free rows with their neighbours by position.

    scores [H, N] float32 (or several of them, [..., H, N]), pos [H, N], free [H, N] -> as scores;
    rows that are not free count as 0 in an average, as the window's rows do in the release, and are
    -inf in the result.
    """
    if kernel == 1:
        return scores.masked_fill(~free, -torch.inf)
    # Overwriting in place leaves old rows in any order; neighbours are meant in the text. Rows that
    # are not free come last, where they pool like what is beyond the end.
    order = pos.masked_fill(~free, torch.iinfo(pos.dtype).max).argsort(dim=1, stable=True)
    real, order = free.gather(1, order), order.expand(scores.shape)
    line = scores.gather(-1, order)
    if how == "max":
        line = F.max_pool1d(line.masked_fill(~real, -torch.inf), kernel, 1, kernel // 2)
    else:
        line = F.avg_pool1d(line.masked_fill(~real, 0.0), kernel, 1, kernel // 2)
    return torch.empty_like(scores).scatter_(-1, order, line).masked_fill(~free, -torch.inf)
