"""ScissorHands (arXiv 2305.17118, section 4): the rows that most often get little attention leave.

Of the last `history` queries (400 by default), it counts those that gave a row less than 1 / (rows
that the query saw). The row with the largest count, relative to the number of queries that could
see it, leaves. Of a prompt only the last 32 queries count, because the attention of the others is
not stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.kernels.attention.plain import visible
from minikv.kernels.dispatch import Kernels
from minikv.kernels.mass.plain import Part, Queries
from minikv.policies import options
from minikv.policies.base import Columns, PromptView, StepPolicy, StepView, Visible
from minikv.policies.options import Method, option
from minikv.policies.selection import in_blocks, ones

BITS = 64
"""Bits of a word, an int64; the highest is its sign."""
LAST = 32
"""Queries of a prompt that count, at most."""
EVEN = 2.0**-13
"""The relative tolerance: a probability slightly below an even share still counts as an even share,
because attention's log-sum-exps have errors of up to 6e-5 in bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScissorHands(StepPolicy):
    """The columns `bits0`, `bits1`, ... are a shift register of `history` bits per row, the
    newest query in the lowest bit of `bits0`. `queries` counts how many of the bits are valid, and
    `lows` how many are set."""

    sinks: int = options.sinks()
    recent: int = options.recent(low=1)
    history: int = option(400, "how many last queries count", (1, 4096))
    name: str = "scissorhands"

    @property
    def prompt_history(self) -> int:  # type: ignore[override]
        return min(LAST, self.history)

    @property
    def columns(self) -> dict[str, torch.dtype]:
        words = {f"bits{i}": torch.int64 for i in range(self._words)}
        return words | {"queries": torch.float32, "lows": torch.float32}

    @property
    def scratch(self) -> int:  # type: ignore[override]
        return 16 * self._words

    @property
    def _words(self) -> int:
        return -(-self.history // BITS)

    def _of(self, columns: Columns) -> list[Tensor]:
        """The words, the newest first."""
        return [columns[f"bits{i}"] for i in range(self._words)]

    def init(self, view: PromptView) -> dict[str, Tensor]:
        assert view.below is not None
        begin, end = view.turns[-1]
        observed = min(self.prompt_history, end - begin)
        # A row gets the bits of the queries from its own on. Shift by as many bits as there were
        # queries that could see the row, all at once.
        able = (end - view.pos.clamp(min=end - observed)).clamp(0, observed)
        bits = view.below()  # before the words are copied: it needs memory of its own
        words = torch.stack(self._of(view.carried))
        carry = torch.empty_like(words)
        carry[0] = bits
        torch.bitwise_right_shift(words[:-1], BITS - able, out=carry[1:])
        carry.bitwise_and_((1 << able) - 1)  # a shift to the right repeats the sign
        words.bitwise_left_shift_(able).bitwise_or_(carry)
        if spare := len(words) * BITS - self.history:  # clear bits of queries older than `history`
            words[-1].bitwise_and_((1 << (BITS - spare)) - 1)
        queries = (view.carried["queries"] + able).clamp(max=float(self.history))
        del able, bits, carry  # the words are counted without them
        lows = torch.stack([ones(word) for word in words]).sum(0).to(torch.float32)
        columns = {f"bits{i}": word for i, word in enumerate(words)}
        return columns | {"queries": queries, "lows": lows}

    def update(self, columns: Columns, attention: Tensor, visible: Visible) -> None:
        low = attention < 1.0 / visible()
        columns["lows"].add_(low)
        columns["queries"].add_(1.0).clamp_(max=float(self.history))
        words, carry = self._of(columns), low.to(torch.int64).neg_()
        bits = self.history - BITS * (len(words) - 1)  # of the last word
        columns["lows"].sub_((words[-1] >> (bits - 1)) & 1)  # the oldest query drops out
        for word in words:
            out = word >> (BITS - 1)  # the highest bit: -1 or 0
            word.add_(word).sub_(carry)  # a shift in place, which torch's own is not
            carry = out
        if bits < BITS:
            words[-1].bitwise_and_((1 << bits) - 1)

    def score(self, view: StepView) -> Tensor:
        return -view.column("lows") / view.column("queries").clamp(min=1.0)

    differs = (
        "one token leaves at every step; in the paper half of the cache at once",
        "counts are relative to the queries that a token was there for, so that young tokens are "
        "not favoured",
        "the first 4 tokens stay (`sinks`); in the paper only the newest 10",
        "of a prompt the last 32 queries count; the paper's window of 400 includes the prompt's",
        "of a prompt, what is below the even share by up to 1/8192 of it is not below: that may be "
        "rounding",
        "a fixed budget, as in the paper; the authors' code keeps whatever got more than a "
        "quantile",
    )


def below_uniform(queries: Queries, parts: Sequence[Part], ops: Kernels) -> Tensor:
    """Which of the last queries, at most 32, gave a row less than an even share: int64 [H, N], see
    `low_bits`."""
    heads, group, rows, _ = queries.q.shape
    at = [part[1].expand(heads, part[1].shape[1]) for part in parts]
    pos = torch.cat(at, 1) if len(at) > 1 else at[0]

    def of(some: slice) -> Tensor:
        p = ops.each_attention(queries, parts, some)
        return low_bits(p, queries.at, pos[some], queries.window)

    return in_blocks(heads, group * rows * pos.shape[1], ops.block, of)


def low_bits(p: Tensor, q_pos: Tensor, k_pos: Tensor, window: int | None) -> Tensor:
    """Which queries gave a row less than an even share: int64 [h, N].

    p float32 [h, G, W, N]: the attention that each query gives each row, W at most 32. q_pos [W];
    k_pos [h, N], -1 for padding. Bit i is set if the i-th query from the end (the last is number 0)
    sees the row, and its attention, the mean over G, is below 1 / (number of rows that it sees) by
    more than the rounding error `EVEN`.
    """
    seen = visible(q_pos, k_pos, window)
    value = 1 << torch.arange(len(q_pos) - 1, -1, -1, device=p.device)
    low = (p.mean(1) < (1.0 - EVEN) / seen.sum(2, keepdim=True)) & seen
    return (low * value[:, None]).sum(1)


METHOD = Method(
    "scissorhands",
    "evicts the token that most often got less than a uniform share of attention",
    rule=ScissorHands,
    good="long answers",
    paper="2305.17118",
    told="below-uniform count",
    state="a bit per query of the window",
    again="fades",
)
