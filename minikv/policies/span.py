"""Spans (kvpress #292): a row passes its worth on to the text that follows it.

A question attends to the place where an answer begins, and the answer is copied from there token by
token. So each row of the text gets the worth of a row before it, if that is more than its own. It
is reduced by `decay` at every position between them, and by `across` at every end of a sentence.
This goes with any scorer and any budgets, as in `adakv+span`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minikv.policies.base import Evidence, PromptView
from minikv.policies.options import option
from minikv.policies.selection import SURE, in_order, out_of_order, ranked


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The row's own worth, or the worth passed on to it, whichever is larger."""

    axis = "carry"
    name = "span"
    summary = "worth carried on to the text that follows"

    decay: float = option(
        0.9, "share of a token's score that is passed on to the next token", (0.01, 0.9999)
    )
    across: float = option(
        1.0, "share that is passed on to the next sentence, times `decay`", (0.01, 1.0)
    )
    first: int = option(4, "first tokens that pass nothing on: attention sinks", (0, 4096))

    def evidence(self, given: Evidence) -> Evidence:
        """What the scorer reads, and this part."""
        return replace(given, sentences=self.across < 1.0)

    def carried(self, view: PromptView, scores: Tensor, free: Tensor, *, adds_up: bool) -> Tensor:
        """The scores float32 [H, N] with what is passed on. adds_up: see `Evidence`; other scores
        are replaced by their ranks among the rows that are free bool [H, N]."""
        worth = scores if adds_up else ranked(scores, view.pos, free)
        return torch.maximum(worth, self._passed(view, worth))

    def noted(self, view: PromptView, *, squares: bool) -> PromptView:
        """The view for a step policy. Attention is passed on there, too, or the text that follows
        would be the first to leave while an answer is copied from it. No row gets more than queries
        could give it. `mass` becomes its mean over G, [H, 1, N]. squares: whether the policy reads
        `squares`; else they become None."""
        if view.mass is None or view.squares is None:
            return view
        mean = view.mean
        both = torch.stack((mean, view.squares)) if squares else mean[None]
        both = torch.maximum(both, self._passed(view, both)).minimum(view.able)
        return replace(view, mass=both[0][:, None], squares=both[1] if squares else None)

    def _passed(self, view: PromptView, worth: Tensor) -> Tensor:
        gives = view.live & (view.pos >= self.first) & (worth < SURE)
        falls = view.once((self, "falls"), lambda: self._falls(view), shared=True)
        return carry(worth.masked_fill(~gives, 0.0), view.pos, falls, view.order)

    def _falls(self, view: PromptView) -> Tensor:
        """float64 [position + 1]: see `carry`. The same for every layer."""
        at = torch.arange(view.position + 1, device=view.pos.device, dtype=torch.float64)
        falls = at * math.log(self.decay)
        if view.sentences is not None:
            ended = view.sentences[: view.position].double()
            falls[:-1].add_(ended, alpha=math.log(self.across))
        falls[-1] = 0.0  # of padding, whose position is -1
        return falls

    differs = (
        "predictable tokens get as much as others; the release passes less on to them (its gate)",
        "`across` below 1 passes less on to the next sentence; the release knows no sentences",
        "decay=0.9; the release has 0.95",
        "a step policy begins with attention that is passed on as well; the release evicts nothing "
        "while an answer is written",
    )


def carry(worth: Tensor, pos: Tensor, falls: Tensor, order: Tensor | None = None) -> Tensor:
    """float32 [..., H, N]: the largest worth that a row gets from the rows at or before its
    position. worth [..., H, N]: at least 0, and 0 for rows with pos -1, where the result has no
    meaning. falls float64 [P]: the logarithm of what is left of a worth from position 0 at each
    position; the last one is 0, for pos -1. order int64 [H, B]: the first B rows by position; the
    others follow them as they are. None: all."""
    order = pos.argsort(dim=1, stable=True) if order is None else order
    same = order.shape[1] == 0 and pos.stride(0) == 0  # of all heads
    fall = falls[pos[:1] if same else in_order(pos, order)]
    line = in_order(worth, order).to(torch.float64).clamp_(min=1e-30).log_().sub_(fall)
    line = line.cummax(-1).values.add_(fall).exp_().to(torch.float32)
    return out_of_order(line, order)
