"""The engine knows token ids only: a prompt in, logits out; a token in, logits out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from minikv.attend import Attend
from minikv.errors import ContextError, NumericsError
from minikv.scheduler import Scheduler


class Network(Protocol):
    """A model as the engine sees it."""

    def forward(self, ids: Tensor, kv: Attend) -> Tensor:
        """ids int64 [T] -> logits of the last token, float32 [V]."""
        ...


class Engine:
    """Feeds a network over its cache. Rows exist for exactly the tokens that were fed."""

    def __init__(self, network: Network, kv: Scheduler) -> None:
        self.network, self.kv = network, kv

    def prompt(
        self,
        ids: Sequence[int],
        progress: Callable[[int, int], None] | None = None,
        room: int = 256,
    ) -> Tensor:
        """Feed a prompt; return the logits of its last token, float32 [V].

        `progress(done, total)` is called on the way and may raise. On any error the cache is
        as it was before. `room` is how many answer tokens are expected. Raises ContextError if the
        positions do not suffice, NumericsError if the logits are not finite.
        """
        kv = self.kv
        if not ids:
            raise ValueError("a prompt needs at least one token")
        left = kv.shape.max_context - kv.position
        if len(ids) > left:
            raise ContextError(
                f"{len(ids):,} tokens do not fit: {left:,} of {kv.shape.max_context:,} positions "
                "are left",
                "eviction frees memory, not positions; shorten the text or start anew with /reset",
            )
        kv.progress = progress
        before = kv.position
        try:
            kv.begin(len(ids), min(room, max(1, left - len(ids))))
            logits = self.network.forward(self._tensor(ids), _Withheld(kv))
            _check(logits, "reading the prompt")
            kv.advance(len(ids))
        except BaseException:
            if kv.position == before:
                kv.rollback()
            raise
        finally:
            kv.progress = None
        return logits

    def step(self, token: int) -> Tensor:
        """Feed one token of an answer; return the next logits, float32 [V].

        On an error the token is not in the cache. Raises ContextError and NumericsError.
        """
        kv = self.kv
        if kv.position >= kv.shape.max_context:
            raise ContextError(
                f"all {kv.shape.max_context:,} positions are used",
                "eviction frees memory, not positions; start anew with /reset",
            )
        try:
            logits = self.network.forward(self._tensor([token]), _Withheld(kv))
            _check(logits, "writing the answer")
        except BaseException:
            kv.rollback()
            raise
        kv.advance(1)
        return logits

    def reset(self) -> None:
        """Forget the conversation."""
        self.kv.reset()

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self.kv.device)


class _Withheld:
    """The cache without `advance`: the engine looks at the logits before a forward counts."""

    def __init__(self, kv: Scheduler) -> None:
        self.position, self.attend = kv.position, kv.attend

    def advance(self, tokens: int) -> None:
        """Left to the engine."""


def _check(logits: Tensor, doing: str) -> None:
    if not bool(torch.isfinite(logits).all()):
        raise NumericsError(
            f"the network produced NaN or infinite logits while {doing}",
            "the weights may be damaged, or too large for this dtype; try --dtype float32",
        )
