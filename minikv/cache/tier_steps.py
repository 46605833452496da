"""Decode steps over a whole tier: what a cache without eviction would compute, with one layer on
the device at a time. The tier is only read, and the cache is not used."""

from __future__ import annotations

import torch
from torch import Tensor

from minikv.cache.tier import Tier
from minikv.kernels.dispatch import Kernels

_ROOM = 64  # tokens by which the steps' own rows grow


class TierSteps:
    """`Attend` for one token at a time, over the first `rows` rows of a tier and the tokens fed
    here. Call `close` after the last one."""

    def __init__(self, tier: Tier, rows: int, ops: Kernels) -> None:
        assert 0 <= rows <= tier.length
        self._tier, self._rows, self._ops = tier, rows, ops
        self.position = rows
        shape = tier.shape
        self._own = [self._blank(0) for _ in range(shape.layers)]  # keys and values, by layer

    def _blank(self, rows: int) -> Tensor:
        shape, tier = self._tier.shape, self._tier
        wide = (2, shape.kv_heads, rows, shape.head_dim)
        return torch.empty(wide, dtype=tier.dtype, device=tier.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend`; one token."""
        assert len(q) == 1
        tier, shape, fed = self._tier, self._tier.shape, self.position - self._rows
        if layer == 0:
            tier.open(tier.length)
        if fed == self._own[layer].shape[2]:
            grown = self._blank(fed + _ROOM)
            grown[:, :, :fed] = self._own[layer]
            self._own[layer] = grown
        own = self._own[layer]
        own[0, :, fed], own[1, :, fed] = k[0], v[0]
        query = q[0].view(shape.kv_heads, -1, 1, shape.head_dim)
        window = shape.windows[layer]
        oldest = 0 if window is None else max(0, self.position + 1 - window)
        parts = []
        if oldest < self._rows:
            key, value = tier.stage(layer, tier.length)
            seen = slice(oldest, self._rows)
            parts.append(self._ops.rows_attention(query, key[:, seen], value[:, seen]))
        seen = slice(max(0, oldest - self._rows), fed + 1)
        parts.append(self._ops.rows_attention(query, own[0, :, seen], own[1, :, seen]))
        return self._ops.merge(parts)[0].reshape(1, shape.heads, shape.head_dim)

    def advance(self, tokens: int) -> None:
        """See `Attend`."""
        assert tokens == 1
        self.position += 1
        self.close()

    def close(self) -> None:
        """Free the working memory of the tier. Cannot fail."""
        self._tier.drop()
