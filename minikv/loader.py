"""The assembly: settings in, a chat out, for `minikv.load` and the commands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.reuse import checked
from minikv.errors import UsageError
from minikv.policies import DEFAULT_BUDGET, DEFAULT_PROMPT

if TYPE_CHECKING:
    from torch import Tensor

    from minikv.chat.session import ChatSession


WEIGHTS = ("auto", "plain", "int8", "int4", "int8+head", "int4+head")
"""Values of --weights, as `models.linear` knows them."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All that decides what a chat computes, and `threads` to do it on (0: all that the process may
    use; None: as torch has it). `model` None is the bundled one."""

    model: str | None = None
    policy: str = DEFAULT_PROMPT
    budget: str = DEFAULT_BUDGET
    decode: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    weights: str = "auto"
    kernels: str = "auto"
    seed: int = 0
    options: Mapping[str, object] = field(default_factory=dict)
    stride: int = 0
    kv: str = "auto"
    pin_system: bool = False
    revision: str | None = None
    offline: bool = False
    system: str = ""
    reuse: str = "once"
    threads: int | None = None

    def __post_init__(self) -> None:
        """Refuse at once, without torch, what no machine could have. Raises UsageError."""
        checked(self.reuse)
        if self.threads is not None and not 0 <= self.threads <= 4096:
            raise UsageError(
                f"--threads must be from 0 to 4,096, got {self.threads}", "0 uses all there are"
            )
        if self.kv not in ("auto", "int8"):
            raise UsageError(f"keys and values cannot be kept in {self.kv!r}", "use auto or int8")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(self.device)):
            raise UsageError(f"unknown device {self.device!r}", "use auto, cpu, cuda or cuda:N")
        if self.weights not in WEIGHTS:
            raise UsageError(f"unknown weights {self.weights!r}", f"use {', '.join(WEIGHTS)}")
        if self.kernels not in ("auto", "triton", "torch"):
            raise UsageError(f"unknown kernels {self.kernels!r}", "use auto, triton or torch")
        if self.kernels == "triton" and self.device == "cpu":
            raise _no_cuda()

    def eviction(self) -> EvictionConfig:
        """The eviction settings, checked without torch. Raises UsageError."""
        return EvictionConfig.read(
            self.policy, self.decode, self.budget, self.options, self.seed, self.stride
        )


class LoadProgress(Protocol):
    """Who is told how far the assembly has come: `minikv.models.hub.Progress`, and the kernels."""

    def planned(self, files: int, size: int, free: int | None) -> None: ...
    def download(self, done: int, total: int) -> None: ...
    def weights(self, done: int, total: int) -> None: ...
    def kernels(self) -> None:
        """The C kernels are about to be compiled, which takes seconds."""
        ...


def build(settings: Settings, progress: LoadProgress | None = None) -> ChatSession:
    """Load the model and put cache, engine and chat around it; `progress` is told how far it is.

    Raises UsageError before anything is loaded where it can; ModelError when the model is missing,
    unsupported or damaged.
    """
    eviction = settings.eviction()
    # torch comes in here, so that what needs no model answers at once.
    import torch

    from minikv.cache.kv_cache import KVCache
    from minikv.cache.stats import Shape
    from minikv.chat.facts import Facts
    from minikv.chat.session import ChatSession
    from minikv.engine import threads
    from minikv.engine.engine import Engine
    from minikv.engine.warmup import compiles, warm
    from minikv.models import load

    if settings.kernels == "triton" and not torch.cuda.is_available():
        raise _no_cuda()
    if settings.threads is not None:
        threads.use(settings.threads)
    prompt, step, budget, stride = eviction.policies()
    began = perf_counter()
    loaded = load(
        settings.model,
        revision=settings.revision,
        offline=settings.offline,
        device=settings.device,
        dtype=settings.dtype,
        weights=settings.weights,
        progress=progress,
    )
    load_s = perf_counter() - began
    config, network = loaded.config, loaded.network
    shape = Shape(
        layers=config.layers,
        kv_heads=config.kv_heads,
        heads=config.heads,
        head_dim=config.head_dim,
        windows=config.windows,
        max_context=config.max_context,
    )

    def output(layer: int) -> Tensor:
        """W_O as [H, G, D, hidden]."""
        matrix = network.layers[layer].out.dense().T
        return matrix.view(config.kv_heads, -1, config.head_dim, config.hidden)

    if progress is not None and compiles(network.device, settings.kernels):
        progress.kernels()
    kv = KVCache(
        shape,
        prompt,
        step,
        budget,
        dtype=network.dtype,
        device=network.device,
        stride=stride,
        kv=torch.int8 if settings.kv == "int8" else None,
        output=output,
        rotary=network.rotary.inverse,
        kernels=settings.kernels,
    )
    if kv.ops.name != "torch":
        network.use(kv.ops)
    if kv.ops.name == "triton":
        warm(kv, network)
        if kv.ops.name != "triton":
            network.use(None)
    return ChatSession(
        Engine(network, kv),
        loaded.tokenizer,
        loaded.template,
        max_context=config.max_context,
        eviction=eviction,
        seed=settings.seed,
        system=settings.system,
        pin_system=settings.pin_system,
        reuse=settings.reuse,
        facts=Facts(
            model=loaded.name,
            revision=loaded.revision or "",
            device=str(network.device),
            dtype=str(network.dtype).removeprefix("torch."),
            kv=str(kv.kv).removeprefix("torch."),
            kernels=kv.ops.name,
            load_s=load_s,
            weight_bytes=loaded.weight_bytes,
            weights=settings.weights,
            notes=config.notes,
        ),
    )


def _no_cuda() -> UsageError:
    return UsageError("no triton kernels without a CUDA device", "use --kernels auto or torch")
