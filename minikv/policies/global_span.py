"""Rows that the question attends to stay, with the text after them (QuerySpan, kvpress #292).

The attention of each query is divided by the norm of the layer's input there. A row's worth is the
largest of these over the window and the query heads of its group, times |v W_O|: the root mean
square over these heads. `Span` passes this worth on to the text that follows. One budget serves all
layers and heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minikv.policies import options
from minikv.policies.base import Evidence, PromptView, Scorer
from minikv.policies.options import Method, option
from minikv.policies.outputs import output_lengths
from minikv.policies.parts import GlobalBudget
from minikv.policies.span import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class QuerySpan(Scorer):
    """The largest attention of a query, divided by |h|, times |v W_O| (root mean square)."""

    name = "global-span"
    summary = "question's attention"

    window: int = option(
        32, "last queries that score; they should cover the question (the release: 64)", (1, 4096)
    )
    sinks: int = options.sinks()
    recent: int = options.recent()

    @property
    def evidence(self) -> Evidence:
        return Evidence(
            observe=self.window,
            asks=True,
            sinks=self.sinks,
            window=self.recent,
            copies="v",
            norms="one",
            lengths=True,
        )

    def score(self, view: PromptView) -> Tensor:
        assert view.largest is not None
        scale = None if view.lengths is None else 1.0 / view.lengths.clamp(min=1e-30)
        largest = view.largest(scale).amax(1).mul_(output_lengths(view, together=True)[:, 0])
        return largest.masked_fill_(~view.live, 0.0)

    differs = (
        "a value has one norm for all query heads of its KV head; the release has one for each",
        "the release protects no newest tokens (`recent`); without them small budgets lose the end "
        "of the question",
    )


METHOD = Method(
    "global-span",
    "tokens that the question attends to, and the text after them, wherever they are: QuerySpan "
    "in one reading, with one budget for all layers and heads",
    parts=(QuerySpan, Span, GlobalBudget),
    good="answers of many words",
    paper="kvpress292",
    preset={"decay": 0.995, "across": 0.6, "first": 0, "recent": 4},
)
