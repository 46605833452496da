"""QuerySpan (kvpress #292): rows that the question attends to, and the unpredictable text after
them.

A row's own worth is the largest attention that a query of the window gives it, times the norm of
its value after W_O, divided by the norm of the layer's input at the query. A question attends to
the place where an answer begins, and the answer is copied from there token by token. So a row
passes its worth on to the rows after it, reduced by `decay` at each position, and a row gets more
of it the less the network could predict its token.

The release reads a prompt once, holds every layer until the end and then evicts. Here a prompt is
read twice: first only for the probability of each token, then to choose. So peak memory is that of
one layer, and the choice is the same. What was probable is kept in a column, for later prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.policies.base import Evidence, PromptView, Scorer, blocks
from minikv.policies.outputs import output_lengths

_COLUMN = "foreseen"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuerySpan(Scorer):
    """The row's own worth, or the worth passed on to it times (1 - p)^gate, whichever is larger.
    near: p is the smallest probability among so many neighbouring tokens."""

    window: int
    sinks: int
    recent: int
    decay: float
    gate: float
    near: int

    @property
    def evidence(self) -> Evidence:
        return Evidence(
            observe=self.window,
            asks=True,
            sinks=self.sinks,
            window=self.recent,
            each_query=True,
            lengths=True,
            predicted=True,
        )

    @property
    def columns(self) -> Mapping[str, torch.dtype]:
        return {_COLUMN: torch.float32}

    def state(self, view: PromptView) -> dict[str, Tensor]:
        """The column float32 [H, N] after the prompt: the smallest probability of the `near` tokens
        around each row's token in its prompt; 0 where probabilities are not known."""
        known = view.carried[_COLUMN]
        if view.predicted is None:
            return {_COLUMN: known}
        least = -F.max_pool1d(-view.predicted[None], self.near, 1, self.near // 2)[0]
        at = view.pos - (view.position - len(view.predicted))
        return {_COLUMN: torch.where(at >= 0, least[at.clamp(min=0)], known)}

    def score(self, view: PromptView) -> Tensor:
        assert view.attention is not None
        assert view.mass is not None
        norms, most = output_lengths(view), []
        for some in blocks(len(norms), norms[0].numel() * view.observed, view.ops.block):
            p = view.attention(some)  # [h, G, W, N]
            if view.lengths is not None:
                p = p / view.lengths.clamp(min=1e-30)[:, None]
            most.append((p.amax(2) * norms[some]).amax(1))
        worth = torch.cat(most).masked_fill(~view.live, 0.0)
        carried = carry(worth, view.pos, self.decay)
        unforeseen = (1.0 - self.state(view)[_COLUMN]).clamp(0.0, 1.0)
        return torch.maximum(worth, carried * unforeseen**self.gate)


def carry(worth: Tensor, pos: Tensor, decay: float) -> Tensor:
    """float32 [H, N]: the largest worth that a row gets from the rows at or before its position; a
    worth is multiplied by `decay` for every position between them. worth [H, N]: at least 0, and 0
    for rows with pos -1."""
    order = pos.argsort(dim=1, stable=True)
    line = worth.gather(1, order).to(torch.float64).clamp(min=1e-30).log()
    fall = pos.gather(1, order).to(torch.float64) * math.log(decay)
    line = ((line - fall).cummax(1).values + fall).exp().to(torch.float32)
    return torch.empty_like(worth).scatter_(1, order, line)
