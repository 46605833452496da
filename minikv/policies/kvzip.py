"""KVzip (arXiv 2505.23416, section 3; release snu-mllab/KVzip): rows that repeating the text needs.

The network is asked to repeat what it has read, and is fed the text again as its answer, in chunks
of the text. A row is worth the most attention that any query of the repeat gives it, over the query
heads of its KV head. The softmax is over the conversation's first rows, the chunk, and the repeat
itself so far; the rest of the text is left out of it.

KVzip+ (arXiv 2601.07891, section 3; kvpress): times |v W_O|, what the row can write to the residual
stream, over |h|, the layer's input at the query.

The scores have nothing to do with a question, so rows keep theirs in a column, and what is scored
once is not scored again. What was said since, questions and answers, has no score: the newest of it
stays, and the rest leaves before all that was scored, the oldest first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.policies.base import Evidence, PromptView, Repeat, RepeatView, Scorer, Wording
from minikv.policies.outputs import output_lengths

_COLUMN = "worth"
_LEAST = 1e-30  # of a row that was scored: more than 0, which stands for none
_WHOLE = 1e20  # of a text that was not scored, as it always has room
_SAID = 1e30  # above every score
_SHORTEST = 16  # tokens of a chunk, where the last positions of the context are used


@dataclass(frozen=True, slots=True, kw_only=True)
class KVzip(Scorer):
    """chunk: tokens that are repeated at once. overlap: tokens of the chunk before that the request
    for a later chunk names. said: the share of the budget that the newest of what was said since
    may take. plus: KVzip+."""

    sinks: int
    chunk: int
    overlap: int
    said: float
    plus: bool

    @property
    def evidence(self) -> Evidence:
        return Evidence(sinks=self.sinks, window=1, second_pass=True, lengths=self.plus)

    @property
    def columns(self) -> Mapping[str, torch.dtype]:
        return {_COLUMN: torch.float32}

    def second_pass(
        self, ids: Sequence[int], first: int, words: Wording, room: int
    ) -> Sequence[Repeat]:
        asked = max(len(words.first), len(words.later) + self.overlap) + len(words.answer)
        chunk = min(self.chunk, room - asked)
        if chunk < min(_SHORTEST, len(ids) - first):
            return ()
        repeats = []
        for begin in range(first, len(ids), chunk):
            end = min(len(ids), begin + chunk)
            named = ids[max(first, begin - self.overlap) : begin]
            request = (*words.later, *named) if begin > first else words.first
            repeats.append(Repeat((*request, *words.answer, *ids[begin:end]), begin, end))
        return repeats

    def peak(self, view: RepeatView) -> Tensor:
        parts = [*view.first, view.chunk, view.own]
        scale = 1.0 / view.lengths if self.plus and view.lengths is not None else None
        found = view.ops.peak_attention(
            view.query, view.at, parts, len(view.first), view.window, scale, view.lse
        )
        if self.plus:
            found = found * output_lengths(view)
        return found.amax(1)

    def state(self, view: PromptView) -> dict[str, Tensor]:
        """A text that always has room is worth more than any that was scored."""
        worth = view.carried[_COLUMN]
        if view.asks:
            return {_COLUMN: worth}
        begin = view.turns[-1][0] if view.turns else 0
        new = _WHOLE if view.peak is None else view.peak.clamp(min=_LEAST)
        return {_COLUMN: torch.where(view.pos >= begin, new, worth)}

    def score(self, view: PromptView) -> Tensor:
        worth = self.state(view)[_COLUMN]
        newest = view.position - int(self.said * view.budget)
        if view.asks and view.turns:
            newest = min(newest, view.turns[-1][0])
        return worth.masked_fill((worth == 0.0) & (view.pos >= newest), _SAID)
