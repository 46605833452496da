"""SnapKV (arXiv 2404.14469, section 4): the rows that the last window of the prompt attends to.

The attention of the last W queries is averaged over the window and the query heads of a group,
pooled over neighbouring rows, and the best rows of each KV head stay beside the window itself.
Departures from the release: one kept set per KV head, not per query head, so that grouped-query
models really free memory; float32 throughout; the mean over the group comes before pooling;
an even share of the budget includes the window; max pooling of 7, as in the published runs.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        return view.ops.pool(scores, view.pos, free, self.kernel, self.pooling)


def join_group(mass: Tensor, how: str) -> Tensor:
    """[H, G, N] -> [H, N]: join the query heads of each KV head by mean, sum or max."""
    if how == "max":
        return mass.amax(1)
    return mass.sum(1) if how == "sum" else mass.mean(1)
