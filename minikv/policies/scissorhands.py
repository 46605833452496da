"""ScissorHands (arXiv 2305.17118, section 4): rows leave that most often get little attention.

Of the last `history` queries (400 by default), it counts those that gave a row less than 1 / (rows
that the query saw). The row with the largest count, relative to the number of queries that could
see it, leaves. Departures from the paper: one row leaves per step, not half of the cache at once;
sinks are protected. Of a prompt only the last 32 queries count, because the attention of the others
is not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.kernels.dispatch import Kernels
from minikv.policies.base import PromptView, StepEnd, StepPolicy, StepView, unprotected
from minikv.policies.hashevict import ones

_BITS = 32  # bits of history in a column


@dataclass(frozen=True, slots=True, kw_only=True)
class ScissorHands(StepPolicy):
    """The columns `below0`, `below1`, ... are a shift register of `history` bits per row, the
    newest query in the lowest bit of `below0`. `queries` counts how many of the bits are valid."""

    sinks: int
    recent: int
    history: int
    name: str = "scissorhands"

    @property
    def prompt_history(self) -> int:  # type: ignore[override]
        return min(_BITS, self.history)

    @property
    def columns(self) -> dict[str, torch.dtype]:
        words = {f"below{i}": torch.int64 for i in range(self._words)}
        return words | {"queries": torch.float32}

    @property
    def _words(self) -> int:
        return -(-self.history // _BITS)

    def prompt(self, view: PromptView, old: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert view.below is not None
        begin, end = view.turns[-1]
        observed = min(self.prompt_history, end - begin)
        queries = (end - view.pos.clamp(min=end - observed)).clamp(0, observed)
        # Shift by as many bits as there were queries that could see the row, all at once.
        words = torch.stack([old[f"below{i}"] for i in range(self._words)])
        carry = torch.empty_like(words)
        torch.bitwise_and(view.below(), (1 << queries) - 1, out=carry[0])
        torch.bitwise_right_shift(words[:-1], _BITS - queries, out=carry[1:])
        full = (1 << _BITS) - 1
        words.bitwise_left_shift_(queries).bitwise_or_(carry).bitwise_and_(full)
        spare = self._words * _BITS - self.history
        if spare:  # clear bits of queries older than `history`
            words[-1].bitwise_and_(full >> spare)
        columns = {f"below{i}": word for i, word in enumerate(words)}
        columns["queries"] = (old["queries"] + queries).clamp(max=float(self.history))
        return columns

    def update(
        self, columns: Mapping[str, Tensor], probabilities: Tensor, visible: Callable[[], Tensor]
    ) -> None:
        carry = (probabilities < 1.0 / visible()).to(torch.int64)
        full = (1 << _BITS) - 1
        words = self._words
        for i in range(words):
            word = columns[f"below{i}"]
            out = word >> (_BITS - 1)
            word.bitwise_left_shift_(1).bitwise_and_(full).bitwise_or_(carry)
            carry = out
        spare = words * _BITS - self.history
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
        # A block's own rows begin with zeros: bits of queries before them are 0, like theirs.
        queries, rows = probabilities.shape[1:]
        low = (probabilities < 1.0 / visible()[..., None]).tril_(rows - queries)
        words = [columns[f"below{i}"] for i in range(self._words)]
        for i, word in enumerate(_shifted(words, _packed(low), queries)):
            bits = min(_BITS, self.history - i * _BITS)
            words[i].copy_(word.bitwise_and_((1 << bits) - 1))
        later = torch.arange(rows, 0, -1, device=low.device).clamp_(max=queries)
        columns["queries"].add_(later).clamp_(max=float(self.history))

    def score(self, view: StepView, count: int | Tensor) -> tuple[Tensor, Tensor]:
        words = [c for name, c in view.columns.items() if name != "queries"]
        below = torch.stack([ones(word) for word in words]).sum(0)
        share = below / view.columns["queries"].clamp(min=1.0)
        return -share, unprotected(view, self)

    def end_kernel(self, ops: Kernels, end: StepEnd) -> bool:
        if ops.scissorhands_step is None:
            return False
        words = [column for name, column in end.columns.items() if name != "queries"]
        queries = end.columns["queries"]
        ops.scissorhands_step(*end.heads, words, queries, self.history, end.window)
        return True


def _packed(bits: Tensor) -> list[Tensor]:
    """Bits [H, t, N], oldest first, as int64 words [H, N] of `_BITS` bits, the newest bit in the
    lowest one of the first word."""
    found = []
    for part in torch.split(bits.flip(1), _BITS, 1):
        places = torch.arange(part.shape[1], device=bits.device)[:, None]
        found.append((part.to(torch.int64) << places).sum(1))
    return found


def _shifted(words: Sequence[Tensor], new: Sequence[Tensor], count: int) -> list[Tensor]:
    """The first words of a shift register after `count` bits came in, which are the words `new`.
    Bits above `_BITS` are not cleared."""
    full, part = divmod(count, _BITS)
    found = []
    for i in range(len(words)):
        word = torch.zeros_like(words[i])
        if i >= full:
            word |= words[i - full] << part
        if part and i > full:
            word |= words[i - full - 1] >> (_BITS - part)
        if i < len(new):
            word |= new[i]
        found.append(word)
    return found
