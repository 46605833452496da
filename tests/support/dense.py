"""The oracle of attention: keeps every key and value, masks by position, softmax in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class DenseCache:
    """`minikv.cache.attend.Attend` with no eviction and nothing clever.

    `windows`: per layer, the number of visible tokens counting the query's own; None: all.
    """

    def __init__(self, layers: int, windows: Sequence[int | None] | None = None) -> None:
        self.position = 0
        self.windows = tuple(windows) if windows is not None else (None,) * layers
        self.keys: list[list[Tensor]] = [[] for _ in range(layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(layers)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [t, H*G, D], k and v [t, H, D] -> [t, H*G, D]; chunks of a forward come in order."""
        self.keys[layer].append(k)
        self.values[layer].append(v)
        keys, values = torch.cat(self.keys[layer]), torch.cat(self.values[layer])
        total, heads, size = keys.shape
        count = q.shape[0]
        grouped = q.view(count, heads, -1, size).float()  # query head h*G + g reads KV head h
        scores = torch.einsum("thgd,nhd->hgtn", grouped, keys.float()) / size**0.5
        at = torch.arange(total - count, total)[:, None]
        distance = at - torch.arange(total)[None, :]
        visible = distance >= 0
        window = self.windows[layer]
        if window is not None:
            visible &= distance < window
        p = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        mixed = torch.einsum("hgtn,nhd->thgd", p, values.float())
        return mixed.reshape(count, -1, size).to(q.dtype)

    def advance(self, tokens: int) -> None:
        self.position += tokens
        assert all(sum(k.shape[0] for k in keys) == self.position for keys in self.keys)
