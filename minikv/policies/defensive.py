"""DefensiveKV (arXiv 2510.13334, section 4): a row is worth what its loss costs in the worst case.

The attention of each query of the window is pooled over neighbouring rows and scaled to the sum
that it had before. A row's risk is the largest attention that any query of any query head of the
group gives it, but at least the mean risk of its head. A row's score is its risk times the norm of
its value after W_O.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.policies import options
from minikv.policies.base import Evidence, PromptView, Scorer
from minikv.policies.options import Method, option
from minikv.policies.outputs import output_norms
from minikv.policies.some_heads import by_query

_QUERIES = 8  # at least this many queries are pooled at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Defensive(Scorer):
    """Worst-case attention times the value's norm; the window's own rows all stay. At most an even
    share of the budget is `sure`."""

    name = "defensive"
    summary = "worst-case attention x value"

    window: int = options.window()
    kernel: int = options.kernel(5)
    values: str = option(
        "plain",
        "plain: multiply by |v W_O|; heads: by its share of the sum over all heads (the release); "
        "none: attention alone",
        ("plain", "heads", "none"),
    )
    sure: float = option(
        0.0,
        "the tokens that hold this share of a head's attention stay before all others (the "
        "release: 0.9)",
        (0.0, 1.0),
    )
    sinks: int = options.sinks()

    @property
    def evidence(self) -> Evidence:
        return Evidence(
            observe=self.window,
            asks=True,
            sinks=self.sinks,
            window=self.window,
            each_query=True,
            copies="v",
            projects=self.values != "none",
        )

    def score(self, view: PromptView) -> Tensor:
        _, free, (_, _, have) = view.divide(*self.protected(view))
        gone = ~free
        # Rows are pooled with their neighbours in the text; rows that are not free come last.
        order = view.pos.masked_fill(gone, torch.iinfo(view.pos.dtype).max)
        order = order.argsort(dim=1, stable=True)
        line = by_query(
            view,
            lambda p, some: worst_case(p, order[some], free[some], self.kernel, view.ops.block),
        )
        risk = torch.empty_like(line).scatter_(1, order, line)
        mean = risk.sum(1, keepdim=True) / have[:, None].clamp(min=1)
        worth = risk.clamp(min=mean)
        if self.values != "none":
            norms = output_norms(view).masked_fill(gone, 0.0)
            if self.values == "heads":
                norms = over_heads(norms, view.pos, view.position)
            worth = worth * norms
        if self.sure:
            each = max(0, view.budget - self.sinks - self.window)
            most = most_of(view.mean * free, self.sure, each)
            worth = torch.where(most, worth.max(), worth)
        return worth.masked_fill(gone, -torch.inf)

    differs = (
        "the release takes the tokens that hold 90 % of a head's attention first, less the "
        "attention on tokens before the window, which it takes for the window's own; here that is "
        "`sure` without the mistake, and off",
        "the release divides |v W_O| by its sum over heads (`values`)",
        "the release gives out a layer's budget by the scores alone (`+ada` with alpha=0), or that "
        "of all layers (`+global`); alone it is even here",
    )


def worst_case(p: Tensor, order: Tensor, free: Tensor, kernel: int, numbers: int) -> Tensor:
    """float32 [h, N]: the largest pooled attention that a query gives to each row, in the order of
    `order` [h, N].

    p [h, G, W, N]: the attention of some heads. Each query's attention is pooled over `kernel`
    neighbouring rows and scaled to the sum that it had before. free bool [h, N]: other rows count
    as 0. numbers: about how many numbers are computed at once.
    """
    order = order[:, None]
    real = free[:, None].gather(2, order)
    most: Tensor | None = None
    queries = p.flatten(1, 2)
    count = max(_QUERIES, numbers // free.numel())
    for lo in range(0, queries.shape[1], count):
        part = queries[:, lo : lo + count]
        line = part.gather(2, order.expand(part.shape)) * real
        total = line.sum(2, keepdim=True)
        line = F.avg_pool1d(line, kernel, 1, kernel // 2) * real
        line = line * (total / line.sum(2, keepdim=True).clamp(min=1e-30))
        top = line.amax(1)
        most = top if most is None else torch.maximum(most, top)
    assert most is not None
    return most


def over_heads(norms: Tensor, pos: Tensor, position: int) -> Tensor:
    """[H, N]: each norm divided by the sum of all heads' norms at its position; 0 if that sum is
    0."""
    at = pos.clamp(min=0)
    total = torch.zeros(position, device=norms.device)
    total.scatter_add_(0, at.flatten(), norms.flatten())
    return norms / total[at].clamp(min=1e-30)


def most_of(mass: Tensor, share: float, most: int) -> Tensor:
    """bool [H, N]: each head's rows with the most attention, up to the share `share` of the head's
    sum; at most `most` rows."""
    found, order = mass.sort(dim=1, descending=True, stable=True)
    reached = found.cumsum(1) >= share * found.sum(1, keepdim=True)
    place = torch.arange(mass.shape[1], device=mass.device)
    sure = ~reached & (place < most)
    return torch.zeros_like(sure).scatter_(1, order, sure)


METHOD = Method(
    "defensive",
    "tokens that may cost most in the worst case: the most attention of any query, times the "
    "length of the value; made for defensive+global",
    parts=(Defensive,),
    good="a question, short answer",
    paper="2510.13334",
)
