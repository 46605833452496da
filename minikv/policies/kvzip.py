"""KVzip (arXiv 2505.23416, section 3; release snu-mllab/KVzip): rows that are needed to repeat the
text stay.

The network is asked to repeat what it has read, and is then fed the text itself as its answer, in
chunks. A row's worth is the largest attention that any query of the repeat gives it, over all query
heads of its KV head. The softmax is over the conversation's first rows, the chunk, and the repeat
itself so far; the other rows of the text are left out.

KVzip+ (arXiv 2601.07891, section 3; kvpress) multiplies this by |v W_O|, the most that the row can
add to the residual stream, and divides it by |h|, the norm of the layer's input at the query.

The scores do not depend on a question. So a column stores them, and rows are not scored again.
Later questions and answers have no score: the newest of these rows stay, and the others leave
before all scored rows, the oldest first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.kernels import Queries
from minikv.policies import options
from minikv.policies.base import Evidence, PromptView, Scorer
from minikv.policies.options import Method, option
from minikv.policies.outputs import output_lengths
from minikv.policies.parts import GlobalBudget
from minikv.policies.repeats import Repeat, RepeatView, Wording
from minikv.policies.selection import SURE

_COLUMN = "worth"
_LEAST = 1e-30  # smallest score of a scored row; 0 means not scored
_WHOLE = 10 * SURE  # score of a text that is not scored because it always fits
_SAID = 100 * SURE  # score of the newest questions and answers, above all others
_SHORTEST = 16  # fewest tokens of a chunk near the end of the context


@dataclass(frozen=True, slots=True, kw_only=True)
class KVzip(Scorer):
    """The largest attention from a repeat of the text, stored in a column."""

    name = "kvzip"
    summary = "needed to repeat the text"

    sinks: int = options.sinks()
    chunk: int = option(2000, "tokens that are repeated at once", (16, 1 << 20))
    overlap: int = option(
        8, "how many tokens of the previous chunk the request for a later chunk quotes", (0, 256)
    )
    said: float = option(
        0.25, "share of the budget for the newest questions and answers", (0.0, 0.9)
    )
    plus: bool = option(False, "multiply scores by |v W_O| / |h| (KVzip+)")

    @property
    def evidence(self) -> Evidence:
        return Evidence(
            sinks=self.sinks,
            window=1,
            second_pass=True,
            lengths=self.plus,
            norms="each" if self.plus else "",
        )

    @property
    def columns(self) -> Mapping[str, torch.dtype]:
        return {_COLUMN: torch.float32}

    def second_pass(
        self, ids: Sequence[int], first: int, words: Wording, room: int
    ) -> Sequence[Repeat]:
        request_tokens = max(len(words.first), len(words.later) + self.overlap) + len(words.answer)
        chunk = min(self.chunk, room - request_tokens)
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
        queries = Queries(view.query, view.at, view.window, view.lse)
        found = view.ops.peak_attention(queries, parts, len(view.first), scale)
        if self.plus:
            found = found * output_lengths(view)
        return found.amax(1)

    def state(self, view: PromptView) -> dict[str, Tensor]:
        """The column after the prompt. A text that is not scored because it always fits is worth
        more than any scored text."""
        return {_COLUMN: view.once((self, _COLUMN), lambda: self._worth(view))}

    def _worth(self, view: PromptView) -> Tensor:
        worth = view.carried[_COLUMN]
        if view.asks:
            return worth
        begin = view.turns[-1][0] if view.turns else 0
        new = _WHOLE if view.peak is None else view.peak.clamp(min=_LEAST)
        return torch.where(view.pos >= begin, new, worth)

    def score(self, view: PromptView) -> Tensor:
        worth = self.state(view)[_COLUMN]
        newest = view.position - int(self.said * view.budget)
        if view.asks and view.turns:
            newest = min(newest, view.turns[-1][0])
        return worth.masked_fill((worth == 0.0) & (view.pos >= newest), _SAID)

    differs = (
        "the release's softmax is in the model's number format; here it is float32",
        "the release never evicts the system prompt, and has its tokens for the first ones "
        "(--pin-system); kvpress has 4. The template's and the system's other tokens are scored as "
        "the text is",
        "kvpress repeats 2,048 tokens at once (chunk=2048)",
        "the newest token of every head stays; in kvpress it may leave",
        "near the end of the model's context chunks are shorter; the releases read on beyond it",
        "the releases take a question and its answer out of the cache again; here they stay inside "
        "the budget: the last question, and the newest of what was said (said), before the text; "
        "the rest leaves first",
        "a text that takes half the budget at most, with all before it, is not scored but kept",
        "|h| is the length of the layer's input after its norm, as in kvpress; the paper speaks of "
        "the hidden state",
        "in a layer with a sliding window a repeat scores only the tokens that it still sees",
        "the request is the release's for every model. The bundled one never learned to obey it, "
        "but still attends to the text that is fed again",
    )


KVZIP = Method(
    "kvzip",
    "tokens that the model needs to repeat what it has read, whatever is asked; reads twice, and "
    "holds the whole cache in RAM until then",
    parts=(KVzip, GlobalBudget),
    good="many questions, one cache",
    paper="2505.23416",
    state="1 score per token",
    decode="none",
)

KVZIP_PLUS = Method(
    "kvzip+",
    "KVzip's scores, times |v W_O| / |h|: what a token can write to the layer's output",
    parts=(KVzip, GlobalBudget),
    good="many questions, one cache",
    paper="2601.07891",
    state="1 score per token",
    preset={"plus": True},
    decode="none",
)
