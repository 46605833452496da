"""minikv as one of the systems that are measured. Only this file uses its engine."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from minikv.cache.kv_cache import KVCache
from minikv.cache.stats import CacheStats, Shape
from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.bench import machine
from minikv.engine.engine import Engine
from minikv.engine.sampling import Sampling
from minikv.models.llama import Llama

_GREEDY = Sampling()


class Cached:
    """A network under one policy: reads a prompt, writes tokens, says what its cache holds."""

    def __init__(
        self, net: Llama, eviction: EvictionConfig, kernels: str = "auto", kv: str = "auto"
    ) -> None:
        """`kernels` and `kv` as the flags take them. Raises UsageError for a budget that is too
        small."""
        self.net, self.eviction, self.kernels, self.kv = net, eviction, kernels, kv
        self.device, self.vocab = net.device, net.config.vocab
        self.engine = _engine(net, eviction, kernels, kv)
        self._clock = machine.Clock(net.device)
        self._token = 0

    def read(self, ids: list[int], room: int = 256) -> float:
        """Seconds to read a prompt into a new conversation; `room`: how many steps will follow."""
        self.engine.reset()
        return self.read_on(ids, room)

    def read_on(self, ids: list[int], room: int = 256) -> float:
        """Seconds to read a further prompt of the same conversation."""

        def run() -> None:
            self._token = int(self.engine.prompt(ids, room=room).argmax())

        return self._clock(run)

    def write(self, steps: int) -> float:
        """Seconds of a step, mean over `steps`. Greedy: each step is fed the last one's token."""

        def run() -> None:
            for i in range(steps):  # none is launched beyond those that are counted
                self._token = self.engine.next(
                    self._token, self.vocab, _GREEDY, 0, ahead=i + 1 < steps
                )

        return self._clock(run) / steps

    def without_policy(self) -> Cached:
        """Another one, empty, that evicts nothing (see `copy`)."""
        return Cached(self.net, EvictionConfig.read("full", "none"), self.kernels, self.kv)

    def copy(self, of: Cached) -> None:
        """Hold the tokens that `of` holds, without what its policy notes about them."""
        held, kv = of.engine.kv.snapshot(), self.engine.kv
        columns = {name: held.columns[name] for name in kv.arena.columns}
        kv.restore(replace(held, columns=columns), self.eviction.rules())

    def stats(self) -> CacheStats:
        """The statistics of the cache, counted from its tensors."""
        return self.engine.kv.stats()

    def step_kv_bytes(self) -> float:
        """Bytes of keys and values that a step reads."""
        config, stats = self.net.config, self.stats()
        coded = 2 * (config.head_dim + torch.float32.itemsize)  # a byte a number, and a scale
        each = coded if self.kv == "int8" else stats.row_bytes
        return stats.kept_mean * config.layers * config.kv_heads * each

    @property
    def captured(self) -> bool:
        """Whether the last steps were one CUDA graph each."""
        return self.engine.captured

    @property
    def notices(self) -> list[str]:
        """Why something is slower than it could be."""
        return self.engine.notices

    def close(self) -> None:
        """Free the cache."""
        self.engine.reset()


def _engine(net: Llama, eviction: EvictionConfig, kernels: str, kept_in: str) -> Engine:
    config = net.config

    def output(layer: int) -> Tensor:
        """W_O as [H, G, D, hidden]."""
        matrix = net.layers[layer].out.dense().T
        return matrix.view(config.kv_heads, -1, config.head_dim, config.hidden)

    shape = Shape(
        config.layers,
        config.kv_heads,
        config.heads,
        config.head_dim,
        config.windows,
        config.max_context,
    )
    kv = KVCache(
        shape,
        eviction.rules(),
        dtype=net.dtype,
        device=net.device,
        kv=torch.int8 if kept_in == "int8" else None,
        output=output,
        rotary=net.rotary.inverse,
        kernels=kernels,
    )
    net.use(kv.ops if kv.ops.name != "torch" else None)
    return Engine(net, kv)
