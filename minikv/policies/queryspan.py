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

from minikv.policies import options
from minikv.policies.base import Evidence, PromptView, Scorer
from minikv.policies.options import Method, option
from minikv.policies.outputs import output_lengths

_COLUMN = "foreseen"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuerySpan(Scorer):
    """The row's own worth, or the worth passed on to it times (1 - p)^gate, whichever is larger.
    near: p is the smallest probability among so many neighbouring tokens."""

    name = "queryspan"
    summary = "question's attention, carried on"

    window: int = option(
        32, "last queries that score; they should cover the question (the release: 64)", (1, 4096)
    )
    sinks: int = options.sinks()
    recent: int = options.recent()
    decay: float = option(
        0.95, "share of a token's score that is passed on to the next token", (0.01, 0.9999)
    )
    gate: float = option(0.5, "exponent of a token's surprise 1 - p", (0.0, 10.0))
    near: int = option(
        3, "a token's surprise is the largest among this many neighbours (odd)", (1, 63), odd=True
    )

    @property
    def evidence(self) -> Evidence:
        return Evidence(
            observe=self.window,
            asks=True,
            sinks=self.sinks,
            window=self.recent,
            each_query=True,
            copies="v",
            vectors=2,
            lengths=True,
            predicted=True,
        )

    @property
    def columns(self) -> Mapping[str, torch.dtype]:
        return {_COLUMN: torch.float32}

    def state(self, view: PromptView) -> dict[str, Tensor]:
        """The column float32 [H, N] after the prompt: the smallest probability of the `near` tokens
        around each row's token in its prompt; 0 where probabilities are not known."""
        return {_COLUMN: view.once((self, _COLUMN), lambda: self._foreseen(view))}

    def _foreseen(self, view: PromptView) -> Tensor:
        known = view.carried[_COLUMN]
        if view.predicted is None:
            return known
        if self not in view.shared:  # the same for every layer
            least = -F.max_pool1d(-view.predicted[None], self.near, 1, self.near // 2)[0]
            view.shared[self] = least
        at = view.pos - (view.position - len(view.predicted))
        return torch.where(at >= 0, view.shared[self][at.clamp(min=0)], known)

    def score(self, view: PromptView) -> Tensor:
        by = 1.0 if view.lengths is None else view.lengths.clamp(min=1e-30)[:, None]
        largest = view.each_query(lambda p, some: (p / by).amax(2))
        worth = (largest * output_lengths(view)).amax(1).masked_fill(~view.live, 0.0)
        carried = carry(worth, view.pos, self.decay)
        unforeseen = (1.0 - self.state(view)[_COLUMN]).clamp(0.0, 1.0)
        return torch.maximum(worth, carried * unforeseen**self.gate)

    differs = (
        "a prompt that must evict is read twice, first for the probabilities of its tokens; the "
        "release reads once and holds every layer until the end. The choice is the same",
        "tokens of answers, and what another policy read, count as not foreseen",
        "the release always gives out one budget over all layers (`+global`)",
        "the release protects no newest tokens (`recent`); without them small budgets lose the end "
        "of the question",
    )


def carry(worth: Tensor, pos: Tensor, decay: float) -> Tensor:
    """float32 [H, N]: the largest worth that a row gets from the rows at or before its position; a
    worth is multiplied by `decay` for every position between them. worth [H, N]: at least 0, and 0
    for rows with pos -1."""
    order = pos.argsort(dim=1, stable=True)
    line = worth.gather(1, order).to(torch.float64).clamp(min=1e-30).log()
    fall = pos.gather(1, order).to(torch.float64) * math.log(decay)
    line = ((line - fall).cummax(1).values + fall).exp().to(torch.float32)
    return torch.empty_like(worth).scatter_(1, order, line)


METHOD = Method(
    "queryspan",
    "tokens that the question attends to, and the text after them that could not be foreseen "
    "(kvpress' pull request 292); reads a prompt twice; made for queryspan+global",
    parts=(QuerySpan,),
    paper="kvpress292",
    told="question's attention",
    second="reads again",
)
