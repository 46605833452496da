"""Compute a document once for many policies.

The keys and values of a first prompt do not depend on the policy, because every layer attends
before it evicts. Results are bit for bit the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minikv.cache.attend import Attend
from minikv.cache.kv_cache import KVCache
from minikv.cache.prefill import Prefill
from minikv.cache.second_pass import SecondPass
from minikv.cache.tier import Tier
from minikv.engine.decode_loop import Network


class Rereading:
    """A `Network` over `kv` that keeps the rows of the last first prompt in a tier, and its scores.
    For another policy only the end of the same prompt is fed, unless the policy needs the queries
    of all tokens. The network must say how many tokens it reads together (`rows`)."""

    def __init__(self, network: Network, kv: KVCache) -> None:
        self.network, self.kv = network, kv
        self._chunk: int = getattr(network, "rows", 1)
        self._tier = Tier(kv.shape, kv.dtype, kv.device)
        self._ids: Tensor | None = None
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

    def __getattr__(self, name: str) -> Any:
        return getattr(self.network, name)  # what else a policy asks of the network

    def _renew(self, ids: Tensor) -> None:
        """Discard what an error left. If these are other tokens, forget the stored prompt."""
        self._tier.drop()
        if self._ids is None or not torch.equal(ids, self._ids):
            self._ids, self._scored = ids.clone(), {}
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
