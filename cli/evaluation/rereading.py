"""Compute a document once for many policies, and evict it once for many questions under one policy.

The states of a first prompt do not depend on the policy, because every layer attends before it
evicts. So policies that observe the same queries get the same traces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from minikv.cache.attend import Attend
from minikv.cache.kv_cache import KVCache
from minikv.cache.prefill import LayerTrace, Prefill
from minikv.cache.second_pass import SecondPassPrefill
from minikv.cache.snapshot import CacheSnapshot
from minikv.engine.engine import Engine, Network, Predicting


class Rereading:
    """A `Network` over `kv` that stores the last first prompt: the traces and logits that policies
    needed.

    What a policy keeps, and every logit, is bit for bit the same as without it.
    """

    def __init__(self, network: Network, kv: KVCache) -> None:
        self.network, self.kv = network, kv
        self._ids: Tensor | None = None
        self._hidden: Tensor | None = None
        self._known: dict[object, tuple[list[LayerTrace], Tensor]] = {}
        self._scored: dict[object, tuple[SecondPassPrefill, Tensor]] = {}

    def forward(self, ids: Tensor, kv: Attend) -> Tensor:
        """See `Network`; `kv` stands for this object's cache."""
        twice = self.kv.scored_twice
        if twice is not None and not self.kv.position:
            return self._twice(twice, ids, kv)
        reading = self.kv.first
        if reading is None or reading.plan.given:
            return self.network.forward(ids, kv)
        self._renew(ids)
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

    def hidden(self, ids: Tensor, kv: Attend) -> Tensor:
        """See `minikv.engine.engine.Predicting`."""
        network = cast(Predicting, self.network)
        if self.kv.first is None:
            return network.hidden(ids, kv)
        self._renew(ids)
        if self._hidden is None:
            self._hidden = network.hidden(ids, kv).clone()
        return self._hidden

    def _twice(self, reading: SecondPassPrefill, ids: Tensor, kv: Attend) -> Tensor:
        """The forward pass of a first prompt that is read twice: of the prompt, or of a text of the
        second pass."""
        if reading.replayed:
            return self._scored[reading.needs][1]
        if reading.scoring:
            return self.network.forward(ids, kv)
        self._renew(ids)
        known, logits = self._scored.get(reading.needs, (None, None))
        if known is not None and known.scored and logits is not None:
            reading.replay(known)
            return logits.clone()
        logits = self.network.forward(ids, kv)
        if reading.needs is not None:
            self._scored[reading.needs] = reading, logits.clone()
        return logits

    def _renew(self, ids: Tensor) -> None:
        """If these are other tokens, forget the stored prompt."""
        if self._ids is None or not torch.equal(ids, self._ids):
            self._ids, self._known, self._hidden = ids.clone(), {}, None
            self._scored = {}

    def logits(self, hidden: Tensor) -> Tensor:
        """See `minikv.engine.engine.Predicting`."""
        return cast(Predicting, self.network).logits(hidden)

    def keys(self) -> list[Tensor]:
        """Each layer's keys [H, T, D] of the remembered prompt. In a layer with a sliding window,
        those that the next token does not see may be any finite numbers."""
        if self._known:
            traces, _ = next(iter(self._known.values()))
            return [trace.key for trace in traces]
        known = next(known for known, _ in self._scored.values() if known.scored)
        tokens, layers = known.plan.tokens, range(known.shape.layers)
        # `stage` returns the same buffer for every layer.
        return [known.rows.stage(layer, tokens)[0].clone() for layer in layers]


def _staged(reading: Prefill, layer: int, trace: LayerTrace) -> LayerTrace:
    """The trace; if the prompt has a tier, with its rows copied to the tier's buffer."""
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

    @property
    def watch(self) -> Callable[[Tensor], None] | None:
        """See `Attend`."""
        return self._cache.watch

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend`."""
        out = self._kv.attend(layer, q, k, v)
        reading = self._cache.first
        assert reading is not None
        if reading.layer_complete:
            self.traces.append(reading.trace())
        return out


@dataclass(frozen=True, slots=True, eq=False)
class _Evicted:
    """A cache after a first prompt: `key` says which one, under which policies."""

    key: tuple[object, ...]
    held: CacheSnapshot
    logits: Tensor


class Restoring(Engine):
    """An `Engine` that, while `remembers` is set, keeps the cache of the last first prompt. The
    same prompt under the same policies is then not read and evicted again. Results are bit for bit
    the same."""

    remembers = False
    _last: _Evicted | None = None

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
        if self._last is not None and self._last.key == key:
            kv.restore(self._last.held, kv.rules)
            return self._last.logits.clone()
        self._last = None
        logits = super().prompt(ids, progress, room, asks, turn_tokens)
        self._last = _Evicted(key, kv.snapshot(), logits.clone())
        return logits
