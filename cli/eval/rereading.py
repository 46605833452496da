"""Compute a document once for many policies, and evict it once for many questions under one policy.

The keys and values of a first prompt do not depend on the policy, because every layer attends
before it evicts. Results are bit for bit the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from minikv.cache.attend import Attend
from minikv.cache.kv_cache import KVCache
from minikv.cache.prefill import Prefill
from minikv.cache.second_pass import SecondPass
from minikv.cache.snapshot import CacheSnapshot
from minikv.cache.tier import Tier
from minikv.engine.decode_loop import Network
from minikv.engine.engine import Engine, Predicting


class Rereading:
    """A `Network` over `kv` that keeps the rows of the last first prompt in a tier, and its scores.
    For another policy only the end of the same prompt is fed, unless the policy needs the queries
    of all tokens. The network must say how many tokens it reads together (`rows`)."""

    def __init__(self, network: Network, kv: KVCache) -> None:
        self.network, self.kv = network, kv
        self._chunk: int = getattr(network, "rows", 1)
        self._tier = Tier(kv.shape, kv.dtype, kv.device)
        self._ids: Tensor | None = None
        self._hidden: Tensor | None = None
        self._scored: dict[object, SecondPass] = {}

    def forward(self, ids: Tensor, kv: Attend) -> Tensor:
        """See `Network`; `kv` is over this object's cache, or a text that scores."""
        reading = self.kv.reading
        own_tier = isinstance(reading, Prefill) and reading.tier is not None
        later = kv.position or self.kv.position
        if not isinstance(reading, Prefill | SecondPass) or own_tier or later:
            return self.network.forward(ids, kv)
        self._renew(ids)
        if isinstance(reading, SecondPass):
            needs = reading.prompt.scorer, *reading.plan.repeats
            known = self._scored.setdefault(needs, reading)
            if known.scored:
                reading.score_as(known)
            else:
                self._scored[needs] = reading
        given = reading.take(self._tier, self._chunk)
        logits = self.network.forward(ids[given:], _Behind(kv, given))
        self._tier.commit(len(ids))
        return logits

    def hidden(self, ids: Tensor, kv: Attend) -> Tensor:
        """See `minikv.engine.engine.Predicting`."""
        network = cast(Predicting, self.network)
        if self.kv.position or not isinstance(self.kv.reading, Prefill):
            return network.hidden(ids, kv)
        self._renew(ids)
        if self._hidden is None:
            self._hidden = network.hidden(ids, kv).clone()
        return self._hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """See `minikv.engine.engine.Predicting`."""
        return cast(Predicting, self.network).logits(hidden)

    def _renew(self, ids: Tensor) -> None:
        """Discard what an error left. If these are other tokens, forget the stored prompt."""
        self._tier.drop()
        if self._ids is None or not torch.equal(ids, self._ids):
            self._ids, self._hidden, self._scored = ids.clone(), None, {}
            self._tier.truncate(0)


class _Behind:
    """An `Attend` whose first `given` tokens are not fed."""

    def __init__(self, kv: Attend, given: int) -> None:
        self.position, self.attend, self.advance = given, kv.attend, kv.advance
        self._kv = kv

    @property
    def watch(self) -> Callable[[Tensor], None] | None:
        """See `Attend`."""
        return getattr(self._kv, "watch", None)


class Restoring(Engine):
    """An `Engine` that, while `remembers` is set, keeps the cache of the last first prompt. The
    same prompt under the same policies is then not read and evicted again."""

    remembers = False
    _last: tuple[tuple[object, ...], CacheSnapshot, Tensor] | None = None  # (which, cache, logits)

    def prompt(
        self,
        ids: Sequence[int],
        progress: Callable[[int, int], None] | None = None,
        room: int = 256,
        asks: bool = False,
        turn_tokens: int | None = None,
    ) -> Tensor:
        """See `Engine`."""
        kv = self.kv
        if not self.remembers or kv.position:
            return super().prompt(ids, progress, room, asks, turn_tokens)
        key = (kv.rules, kv.pinned, room, asks, turn_tokens, tuple(ids))
        if self._last is not None and self._last[0] == key:
            kv.restore(self._last[1], kv.rules)
            return self._last[2].clone()
        self._last = None
        logits = super().prompt(ids, progress, room, asks, turn_tokens)
        self._last = key, kv.snapshot(), logits.clone()
        return logits
