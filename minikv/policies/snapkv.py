"""SnapKV (arXiv 2404.14469, section 4): the rows that the last window of the prompt attends to.

The attention of the last W queries is averaged over these queries and over the query heads of a
group, then pooled over neighbouring rows. The best rows of each KV head and the window itself stay.
The mean over the group is taken before pooling; the budget includes the window.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minikv.policies import options
from minikv.policies.base import Evidence, PromptView, Scorer
from minikv.policies.options import Method
from minikv.policies.selection import joined, pool


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapKV(Scorer):
    """Pooled mean attention of the window's queries; the window's own rows all stay."""

    name = "snapkv"
    summary = "last-window attention, pooled"

    window: int = options.window()
    kernel: int = options.kernel()
    pooling: str = options.pooling()
    group: str = options.group()
    sinks: int = options.sinks(0)

    @property
    def evidence(self) -> Evidence:
        return Evidence(observe=self.window, asks=True, sinks=self.sinks, window=self.window)

    def score(self, view: PromptView) -> Tensor:
        assert view.mass is not None
        mean = joined(view.mass / view.observed, self.group)
        return pool(mean, view.order, self.free(view), self.kernel, self.pooling)

    differs = (
        "scores are computed in float32; SnapKV's release rounds them to the model's precision, "
        "where many are equal",
        "a KV head keeps one set of tokens, by the mean of its query heads; in SnapKV's release "
        "each query head keeps its own, and keys are stored once per query head (`group`)",
        "a max over 7 neighbours, as in the published LongBench runs; the class in SnapKV's "
        "release has an average over 5 (`kernel`, `pooling`)",
        "of equal scores the younger token stays; releases leave that to the device",
        "at a later prompt its own queries judge old and new tokens together; releases know no "
        "second prompt",
    )


METHOD = Method(
    "snapkv",
    "tokens that the last window of the prompt attends to",
    parts=(SnapKV,),
    good="a question, short answer",
    paper="2404.14469",
)
