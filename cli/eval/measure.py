"""Measures that need more than answers: perplexity, agreement with the full cache, and attention
lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.cache.kv_cache import KVCache
from minikv.cli.eval.metrics import likeness
from minikv.engine.engine import Engine


def negative_log_likelihood(engine: Engine, ids: Sequence[int], read: int) -> list[float]:
    """Nats of each token of ids[read:], fed one by one after the prompt ids[:read]."""
    engine.reset()
    logits = engine.prompt(list(ids[:read]))
    losses = []
    for token in ids[read:]:
        losses.append(-float(logits.log_softmax(-1)[token]))
        logits = engine.step(token)
    return losses


@dataclass(frozen=True, slots=True)
class Agreement:
    """An answer compared with the full cache's. `first`: the index of the first word that differs,
    None if they agree."""

    exact: bool
    first: int | None
    rouge_l: float


def agreement(answer: str, full: str) -> Agreement:
    """Compare two greedy answers to the same question."""
    a, b = answer.split(), full.split()
    differ = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if differ is None and len(a) != len(b):
        differ = min(len(a), len(b))
    return Agreement(differ is None, differ, likeness(answer, full))


class Shadow:
    """An `Attend` that calls a cache and stores every key, to measure the attention that is lost.

    At each step: 1 minus the probability of the tokens that the cache still holds, under attention
    over all tokens ever seen (in a layer with a sliding window, over those in the window). Mean
    over the query heads, [L] per step. `keys`: the keys that the cache has already read, [H, T, D]
    per layer.
    """

    def __init__(self, kv: KVCache, keys: Sequence[Tensor] = ()) -> None:
        self.kv = kv
        self.position = kv.position
        self.lost: list[Tensor] = []
        self._keys: list[Tensor | None] = [k.float() for k in keys] or [None] * kv.shape.layers
        self._now = torch.zeros(kv.shape.layers)

    @property
    def watch(self) -> Callable[[Tensor], None] | None:
        """See `minikv.cache.attend.Attend`."""
        return self.kv.watch

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `minikv.cache.attend.Attend`."""
        before, rows = self._keys[layer], k.float().transpose(0, 1)
        self._keys[layer] = rows if before is None else torch.cat((before, rows), 1)
        reading = self.kv.reading
        out = self.kv.attend(layer, q, k, v)
        if not reading:
            self._now[layer] = self._missed(layer, q[0])
        return out

    def advance(self, tokens: int) -> None:
        """See `minikv.cache.attend.Attend`."""
        if not self.kv.reading:
            self.lost.append(self._now.clone())
        self.kv.advance(tokens)
        self.position = self.kv.position

    def _missed(self, layer: int, q: Tensor) -> Tensor:
        shape, keys = self.kv.shape, self._keys[layer]
        assert keys is not None
        query = q.float().view(shape.kv_heads, -1, shape.head_dim)
        logits = query @ keys.transpose(1, 2) * shape.head_dim**-0.5
        window = shape.windows[layer]
        if window is not None and keys.shape[1] > window:
            logits[..., : keys.shape[1] - window] = -torch.inf
        p = logits.softmax(-1).mean(1)  # [H, N]
        kept = [p[h, self.kv.attended(layer, h)].sum() for h in range(shape.kv_heads)]
        return 1.0 - torch.stack(kept).mean()
