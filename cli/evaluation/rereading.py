"""A document that many policies read is computed once.

The states of a first prompt do not depend on the policy, because every layer attends before it
evicts. So policies that look at the same queries get the same traces.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from minikv.cache.attend import Attend
from minikv.cache.kv_cache import KVCache
from minikv.cache.prefill import LayerTrace, Prefill
from minikv.engine.engine import Network


class Rereading:
    """A `Network` over `kv` that remembers the last first prompt, as far as policies asked for it.

    What a policy keeps, and every logit, is bit for bit what it would be without.
    """

    def __init__(self, network: Network, kv: KVCache) -> None:
        self.network, self.kv = network, kv
        self._ids: Tensor | None = None
        self._known: dict[tuple[bool, int, int | None], tuple[list[LayerTrace], Tensor]] = {}

    def forward(self, ids: Tensor, kv: Attend) -> Tensor:
        """See `Network`; `kv` stands for this object's cache."""
        reading = self.kv.first
        if reading is None or reading.plan.given:
            return self.network.forward(ids, kv)
        if self._ids is None or not torch.equal(ids, self._ids):
            self._ids, self._known = ids.clone(), {}
        if reading.needs not in self._known:
            recorder = _Recorder(kv, self.kv)
            logits = self.network.forward(ids, recorder)
            self._known[reading.needs] = recorder.traces, logits
            return logits.clone()
        traces, logits = self._known[reading.needs]
        for layer, trace in enumerate(traces):
            reading.replay(_staged(reading, layer, trace))
            reading.finish(layer)
        kv.advance(len(ids))
        return logits.clone()

    def keys(self) -> list[Tensor]:
        """Each layer's keys [H, T, D] of the remembered prompt."""
        traces, _ = next(iter(self._known.values()))
        return [trace.key for trace in traces]


def _staged(reading: Prefill, layer: int, trace: LayerTrace) -> LayerTrace:
    """The trace with its rows where the prompt's tier, if it has one, takes them from."""
    if reading.tier is None:
        return trace
    key, value = reading.tier.stage(layer, reading.plan.tokens)
    key.copy_(trace.key)
    value.copy_(trace.value)
    return replace(trace, key=key, value=value)


class _Recorder:
    """Passes a prompt on to `kv` and keeps the trace of each layer of the `cache` behind it."""

    def __init__(self, kv: Attend, cache: KVCache) -> None:
        self.position, self.advance = kv.position, kv.advance
        self.traces: list[LayerTrace] = []
        self._kv, self._cache = kv, cache

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend`."""
        out = self._kv.attend(layer, q, k, v)
        reading = self._cache.first
        assert reading is not None
        if reading.layer_complete:
            self.traces.append(reading.trace())
        return out
