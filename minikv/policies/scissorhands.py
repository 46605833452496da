"""ScissorHands (arXiv 2305.17118, section 4): rows leave that most often get little attention.

Of the last `history` queries (400 by default), it counts those that gave a row less than 1 / (rows
that the query saw). The row with the largest count, relative to the number of queries that could
see it, leaves. Departures from the paper: one row leaves per step, not half of the cache at once;
sinks are protected. Of a prompt only the last 32 queries count, because the attention of the others
is not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.kernels.dispatch import Kernels
from minikv.kernels.torch.history import BITS, low_share
from minikv.policies import options
from minikv.policies.base import (
    BlockEnd,
    PromptView,
    StepEnd,
    StepPolicy,
    StepView,
    unprotected,
)
from minikv.policies.facts import Method
from minikv.policies.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class ScissorHands(StepPolicy):
    """The columns `below0`, `below1`, ... are a shift register of `history` bits per row, the
    newest query in the lowest bit of `below0`. `queries` counts how many of the bits are valid."""

    sinks: int = options.sinks()
    recent: int = options.recent(low=1)
    history: int = option(400, "how many last queries count", (1, 4096))
    name: str = "scissorhands"

    @property
    def prompt_history(self) -> int:  # type: ignore[override]
        return min(BITS, self.history)

    @property
    def columns(self) -> dict[str, torch.dtype]:
        words = {f"below{i}": torch.int64 for i in range(self._words)}
        return words | {"queries": torch.float32}

    @property
    def _words(self) -> int:
        return -(-self.history // BITS)

    def _of(self, columns: Mapping[str, Tensor]) -> list[Tensor]:
        """The words, the newest first."""
        return [columns[f"below{i}"] for i in range(self._words)]

    def prompt(self, view: PromptView, old: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert view.below is not None
        begin, end = view.turns[-1]
        observed = min(self.prompt_history, end - begin)
        words, count = view.ops.prompt_history(
            self._of(old), old["queries"], view.below(), view.pos, end, observed, self.history
        )
        return {f"below{i}": word for i, word in enumerate(words)} | {"queries": count}

    def update(
        self, columns: Mapping[str, Tensor], probabilities: Tensor, visible: Callable[[], Tensor]
    ) -> None:
        carry = (probabilities < 1.0 / visible()).to(torch.int64)
        full = (1 << BITS) - 1
        words = self._words
        for i in range(words):
            word = columns[f"below{i}"]
            out = word >> (BITS - 1)
            word.bitwise_left_shift_(1).bitwise_and_(full).bitwise_or_(carry)
            carry = out
        spare = words * BITS - self.history
        if spare:  # clear bits of queries older than `history`
            columns[f"below{words - 1}"].bitwise_and_(full >> spare)
        columns["queries"].add_(1.0).clamp_(max=float(self.history))

    def update_block(
        self,
        ops: Kernels,
        columns: Mapping[str, Tensor],
        probabilities: Tensor,
        visible: Callable[[], Tensor],
    ) -> None:
        noted = self._of(columns), columns["queries"]
        ops.block_history(*noted, probabilities, visible(), self.history)

    def score(self, view: StepView, count: int | Tensor) -> tuple[Tensor, Tensor]:
        columns = view.columns
        return low_share(self._of(columns), columns["queries"]), unprotected(view, self)

    def block_kernel(self, ops: Kernels, block: BlockEnd) -> tuple[Tensor, Tensor] | None:
        if ops.unprotected_block is None:
            return None
        share = ops.low_share(self._of(block.columns), block.columns["queries"])
        return ops.unprotected_block(share, *block.heads(self))

    def end_kernel(self, ops: Kernels, end: StepEnd) -> bool:
        if ops.scissorhands_step is None:
            return False
        words, queries = self._of(end.columns), end.columns["queries"]
        ops.scissorhands_step(*end.heads, words, queries, self.history, end.window)
        return True


METHOD = Method(
    "scissorhands",
    "evicts the token that most often got less than a uniform share of attention",
    rule=ScissorHands,
    paper="2305.17118",
    scores="below-uniform count",
    shape="each head's own cap",
    state="a bit per query of the window",
    second="fades",
    differs=(
        "one token leaves at every step; in the paper half of the cache at once",
        "counts are relative to the queries that a token was there for, so that young tokens are "
        "not favoured",
        "the first 4 tokens stay (`sinks`); in the paper only the newest 10",
        "of a prompt the last 32 queries count; the paper's window of 400 includes the prompt's",
        "of a prompt, what is below the even share by up to 1/8192 of it is not below: that may be "
        "rounding",
        "a fixed budget, as in the paper; the authors' code keeps whatever got more than a "
        "quantile",
    ),
)
