"""ChunkKV (arXiv 2502.00299, algorithm 1): whole chunks of neighbouring tokens stay or leave.

A chunk's worth is the mean of its rows' SnapKV scores, summed over the KV heads. So all heads of a
layer keep the same chunks. A chunk begins at every multiple of `chunk` positions. If the last chunk
fits only in part, its youngest rows stay, so the budget is used to the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.policies import options
from minikv.policies.base import Evidence, PromptView, Scorer
from minikv.policies.options import Method, option
from minikv.policies.selection import joined, pool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkKV(Scorer):
    """A row's score is the worth of its chunk; the window's own rows all stay."""

    name = "chunkkv"
    summary = "last-window attention of chunks"

    chunk: int = option(10, "tokens of a chunk (kvpress: 20)", (1, 4096))
    window: int = options.window()
    kernel: int = options.kernel(1)
    pooling: str = options.pooling()
    group: str = options.group()
    sinks: int = options.sinks(0)

    @property
    def evidence(self) -> Evidence:
        return Evidence(observe=self.window, asks=True, sinks=self.sinks, window=self.window)

    def score(self, view: PromptView) -> Tensor:
        assert view.mass is not None
        free = self.free(view)
        mean = joined(view.mass / view.observed, self.group)
        scores = pool(mean, view.order, free, self.kernel, self.pooling)
        worth = chunk_means(scores, view.pos, free, self.chunk, view.position)
        return worth.masked_fill(~free, -torch.inf)

    differs = (
        "the releases keep whole chunks only; here the youngest tokens of one more fill the budget",
        "a chunk is worth the mean of its tokens that are still there and not protected; kvpress "
        "has the mean of the whole chunk",
        "kvpress pools scores before (`kernel`, `pooling`), counts the window's tokens in their "
        "chunk, and has chunks of 20 (`chunk`)",
        "layers do not reuse the choice of the previous layer, which is an option in the paper",
    )


def chunk_means(scores: Tensor, pos: Tensor, free: Tensor, size: int, position: int) -> Tensor:
    """float32 [H, N]: for each row the mean score of the free rows in its chunk of `size`
    positions, summed over the heads.

    scores, pos and free [H, N]; positions are below `position`. A head without a free row in a
    chunk adds 0.
    """
    at = pos.clamp(min=0) // size
    both = torch.zeros((2, len(pos), position // size + 1), device=scores.device)
    sums, counts = both[0], both[1]
    sums.scatter_add_(1, at, scores.masked_fill(~free, 0.0))
    counts.scatter_add_(1, at, free.to(torch.float32))
    return (sums / counts.clamp(min=1.0)).sum(0)[at]


METHOD = Method(
    "chunkkv",
    "chunks of neighbouring tokens that the last window attends to, the same for all heads of a "
    "layer",
    parts=(ChunkKV,),
    good="a question, short answer",
    paper="2502.00299",
)
