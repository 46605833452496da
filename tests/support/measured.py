"""What a cache really allocates while it reads and writes, counted by storage."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minikv.cache.kv_cache import KVCache
from minikv.cache.second_pass import SecondPass

CHUNK = 40
"""Tokens of a chunk: few, as what a chunk takes is the network's work space."""


class Watch(TorchDispatchMode):
    """The most bytes alive at once in the memory of tensors that were made inside."""

    def __init__(self, *outside: Tensor) -> None:
        """outside: of the network, and not counted."""
        super().__init__()
        self.outside = {tensor.untyped_storage()._cdata for tensor in outside}
        self.now = self.peak = 0
        self.live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self.outside:
                self.note(tensor)
        return out

    def note(self, tensor: Tensor) -> None:
        """Count the tensor's memory until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live or not storage.nbytes():
            return
        self.live[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self.live.pop(key)


def measured(
    kv: KVCache,
    begin: Callable[[], object],
    fed: int,
    seed: int = 0,
    outside: Iterable[Tensor] = (),
) -> int:
    """The most bytes at once while a prompt is read, of which `fed` tokens go through the network;
    with those that the cache had before. outside: not counted."""
    made = torch.Generator().manual_seed(seed)
    wide = (kv.shape.heads, kv.shape.kv_heads, kv.shape.kv_heads)
    given = [torch.empty(CHUNK, n, kv.shape.head_dim, dtype=kv.dtype) for n in wide]

    def feed(to: Any, tokens: int) -> None:
        for layer in range(kv.shape.layers):
            for lo in range(0, tokens, CHUNK):
                rows = min(CHUNK, tokens - lo)
                if getattr(to, "on_layer_input", None) is not None:
                    to.on_layer_input(torch.randn(rows, 8, generator=made))
                to.attend(layer, *(x.normal_(generator=made)[:rows] for x in given))

    assert kv.output is not None
    with torch.inference_mode(), Watch(kv.output(0), *given, *outside) as watch:
        for column in kv.arena.columns.values():
            watch.note(column)
        begin()
        reading = kv.reading
        feed(kv, fed)
        texts = reading.texts(range(fed)) if isinstance(reading, SecondPass) else ()
        for repeat, text in texts:
            feed(text, len(repeat.ids))
            text.advance(len(repeat.ids))
            del text
        del reading, texts
        kv.end(fed)
    return watch.peak
