"""SnapKV (arXiv 2404.14469, section 4): the rows that the last window of the prompt attends to.

The attention of the last W queries is averaged over the window and the query heads of a group,
pooled over neighbouring rows, and the best rows of each KV head stay beside the window itself.
Departures from the release: one kept set per KV head, not per query head, so that grouped-query
models really free memory; float32 throughout; the mean over the group comes before pooling;
an even share of the budget includes the window; max pooling of 7, as in the published runs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.policies.base import Evidence, PromptView, Scorer, ends, group


def pool(scores: Tensor, pos: Tensor, free: Tensor, kernel: int, how: str) -> Tensor:
    """Pool each head's free rows with their neighbours by position.

    scores [H, N] float32, pos [H, N], free [H, N] -> [H, N]; rows that are not free count as 0
    in an average, as the window's rows do in the release, and are -inf in the result.
    """
    if kernel == 1:
        return scores.masked_fill(~free, -torch.inf)
    # Overwriting in place leaves old rows in any order; neighbours are meant in the text. Rows that
    # are not free come last, where they pool like what is beyond the end.
    order = pos.masked_fill(~free, torch.iinfo(pos.dtype).max).argsort(dim=1, stable=True)
    line, real = scores.gather(1, order), free.gather(1, order)
    if how == "max":
        line = F.max_pool1d(line.masked_fill(~real, -torch.inf), kernel, 1, kernel // 2)
    else:
        line = F.avg_pool1d(line.masked_fill(~real, 0.0), kernel, 1, kernel // 2)
    return torch.empty_like(scores).scatter_(1, order, line).masked_fill(~free, -torch.inf)


def window_scorer(window: int, kernel: int, pooling: str, how: str, sinks: int = 0) -> Scorer:
    """Scorer: pooled mean attention of the window's queries, rows that stay anyway left out."""

    def score(view: PromptView) -> Tensor:
        assert view.mass is not None
        scores = group(view.mass / view.observed, how)
        free = view.live & (view.pos < view.position - window) & (view.pos >= sinks)
        return pool(scores, view.pos, free, kernel, pooling)

    return score


def scorer(options: Mapping[str, object]) -> Evidence:
    """What the window's rows attend to; they all stay."""
    window, kernel, sinks = options["window"], options["kernel"], options["sinks"]
    assert isinstance(window, int)
    assert isinstance(kernel, int)
    assert isinstance(sinks, int)
    score = window_scorer(window, kernel, str(options["pooling"]), str(options["group"]), sinks)
    return Evidence(
        score, ends(sinks, window), observe=window, asks=True, sinks=sinks, window=window
    )
