"""`Attend`: all that a network knows about the KV cache. `DenseAttend`: the reference for tests."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from minikv import kernels
from minikv.kernels.dispatch import Kernels


class Attend(Protocol):
    """What a network sees of the KV cache.

    A forward pass of T tokens visits every layer once, in order. Inside a layer the network may
    pass its T rows in several chunks, in order (t rows each, sum of t = T). Each chunk attends to
    everything seen before it and causally to itself. `advance(T)` ends the forward.

    Three members are optional, and each is a function or None. `on_layer_input`: the network calls
    it before each `attend` of a prompt, with the layer's normed input [t, hidden].
    `attend_unrotated`: `attend` for a single token that also rotates its query and key
    (`DecodeStep.attend_unrotated`). `step_arena`: for a single token, called before the first
    layer. If one kernel can compute all layers at once, it returns that kernel's argument
    (`DecodeStep.step_arena`), and the network does not call `attend`. Otherwise it returns None.
    """

    @property
    def position(self) -> int | Tensor:
        """Tokens already seen: the rotary position of the next one. If no value may be read back,
        an int64 [] tensor on the device."""
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Rotated q [t, H*G, D], rotated k [t, H, D], v [t, H, D] -> mixed values [t, H*G, D]."""
        ...

    def advance(self, tokens: int) -> None:
        """The forward of `tokens` tokens is complete in every layer."""
        ...


class DenseAttend:
    """`Attend` that keeps every row and evicts nothing; windows[i] is layer i's sliding window.

    Uses the same kernels as the cache on the same rows in the same order. So a cache that has
    evicted nothing must agree to the last bit. In a layer whose window has begun to slide it must
    agree up to rounding, because the cache does not keep rows that slid out. A chunk of one row is
    a decode step unless `begin` announced a prompt.
    """

    def __init__(self, windows: tuple[int | None, ...], ops: Kernels | None = None) -> None:
        self.windows, self._ops = windows, ops or Kernels()
        self.position = 0
        self._prompt = False
        self._k: list[Tensor | None] = [None] * len(windows)
        self._v: list[Tensor | None] = [None] * len(windows)

    def begin(self, tokens: int) -> None:
        """The next forward is a prompt, whatever its length."""
        self._prompt = True

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend`."""
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        old_k, old_v = self._k[layer], self._v[layer]
        keys = k if old_k is None else torch.cat((old_k, k), 1)
        values = v if old_v is None else torch.cat((old_v, v), 1)
        self._k[layer], self._v[layer] = keys, values
        rows, heads, end = len(q), len(k), keys.shape[1]
        window = self.windows[layer]
        pos = torch.arange(end, device=q.device)
        if rows == 1 and not self._prompt:
            each = torch.arange(heads, device=q.device) * end
            segments = kernels.Segments(
                keys.reshape(heads * end, -1),
                values.reshape(heads * end, -1),
                each,
                torch.full_like(each, end),
                end,
                None if window is None else pos.to(torch.int32).repeat(heads),
                None if window is None else torch.tensor(end - window, device=q.device),
            )
            out, _ = self._ops.ragged_attention(q[0].view(heads, -1, q.shape[2]), segments)
            return out.reshape(1, q.shape[1], -1)
        query = q.view(len(q), heads, -1, q.shape[2]).permute(1, 2, 0, 3)
        first = end - rows
        if window is not None and end > window:
            mixed, _ = kernels.visible_attention(
                query, keys, values, pos[first:], pos[None], window
            )
        else:
            seen, parts = self.position, []
            if seen:
                parts.append(self._ops.rows_attention(query, keys[:, :seen], values[:, :seen]))
            parts.append(self._ops.last_rows_attention(query, keys[:, seen:], values[:, seen:]))
            mixed, _ = self._ops.merge(parts)
        return mixed.permute(2, 0, 1, 3).reshape(rows, q.shape[1], -1)

    def advance(self, tokens: int) -> None:
        """See `Attend`."""
        self.position += tokens
        self._prompt = False
