"""A document that many policies read is computed once.

The states of a first prompt do not depend on the policy, because every layer attends before it
evicts; so policies that look at the same queries are told the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minikv.cache.attend import Attend
from minikv.cache.kv_cache import KVCache
from minikv.cache.prefill import LayerTrace
from minikv.engine.engine import Network


class Rereading:
    """A `Network` over `kv` that remembers the last first prompt, as far as it was asked about.

    What a policy keeps, and every logit, is bit for bit what it would be without.
    """

    def __init__(self, network: Network, kv: KVCache) -> None:
        self.network, self.kv = network, kv
        self._ids: Tensor | None = None
        self._known: dict[tuple[bool, int, int | None], tuple[list[LayerTrace], Tensor]] = {}

    def forward(self, ids: Tensor, kv: Attend) -> Tensor:
        """See `Network`; `kv` stands for this object's scheduler."""
        reading = self.kv.first
        if reading is None:
            return self.network.forward(ids, kv)
        if self._ids is None or not torch.equal(ids, self._ids):
            self._ids, self._known = ids.clone(), {}
        if reading.needs not in self._known:
            recorder = _Recorder(kv, self.kv)
            logits = self.network.forward(ids, recorder)
            self._known[reading.needs] = recorder.told, logits
            return logits.clone()
        told, logits = self._known[reading.needs]
        for layer, facts in enumerate(told):
            reading.replay(facts)
            reading.finish(layer)
        kv.advance(len(ids))
        return logits.clone()

    def keys(self) -> list[Tensor]:
        """Each layer's keys [H, T, D] of the remembered prompt."""
        told, _ = next(iter(self._known.values()))
        return [facts.key for facts in told]


class _Recorder:
    """Passes a prompt on to `kv` and writes down what each layer told `scheduler`."""

    def __init__(self, kv: Attend, scheduler: KVCache) -> None:
        self.position, self.advance = kv.position, kv.advance
        self.told: list[LayerTrace] = []
        self._attend: Callable[[int, Tensor, Tensor, Tensor], Tensor] = kv.attend
        self._scheduler = scheduler

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend`."""
        out = self._attend(layer, q, k, v)
        reading = self._scheduler.first
        assert reading is not None
        if reading.layer_complete:
            self.told.append(reading.trace())
        return out
