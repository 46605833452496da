"""Builds a chat from settings: loads a model, and makes a cache, an engine and a chat for it."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from os import PathLike, fspath
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from minikv.cache.budget import Budget
from minikv.checks import quoted
from minikv.engine import threads
from minikv.errors import UsageError
from minikv.policies import registry
from minikv.policies.options import options_of
from minikv.settings import Generation, Settings, no_cuda, refuse_gone, settings_of

if TYPE_CHECKING:
    from torch import Tensor

    from minikv.cache.stats import Shape
    from minikv.chat.session import ChatSession
    from minikv.models.config import ModelConfig
    from minikv.models.hub import Progress
    from minikv.models.linear import Packing
    from minikv.models.llama import Llama

    class LoadProgress(Progress, Protocol):
        """Shows the progress of loading."""

        def kernels(self) -> None:
            """Called before the C kernels are compiled, which takes seconds."""


def build(settings: Settings, progress: LoadProgress | None = None) -> ChatSession:
    """Load the model, and make a cache, an engine and a chat for it.

    Raises UsageError, if possible before anything is loaded, and ModelError if the model is
    missing, unsupported or damaged.
    """
    threads.refuse_fork()
    threads.wait_briefly()
    from minikv.models import refuse_without_torch

    refuse_without_torch()
    eviction = settings.eviction()
    # These imports load torch: they are here so that commands without a model start fast.
    import torch

    from minikv.cache.kv_cache import KVCache
    from minikv.chat.closing import Facts
    from minikv.chat.fitting import USEFUL, Machine, tier_beside
    from minikv.chat.recall import Recall
    from minikv.chat.session import ChatSession
    from minikv.chat.store import Store, cache_folder
    from minikv.engine.engine import Engine
    from minikv.engine.sampling import Sampling
    from minikv.engine.warmup import warm
    from minikv.kernels.native import build as native
    from minikv.models import free_memory, load
    from minikv.models.identity import digests
    from minikv.models.weights import packed_forms

    if settings.kernels == "triton" and not torch.cuda.is_available():
        raise no_cuda()
    if settings.threads is not None:
        threads.use(settings.threads)
    rules = eviction.rules()

    def announce() -> None:
        """Call `progress.kernels` if the C kernels of a CPU must still be compiled, once per
        machine."""
        if progress is not None and settings.kernels == "auto" and native.compiles():
            for line in native.remarks():
                progress.say(line)
            progress.kernels()

    packing = packing_of(settings.kernels, announce)  # used only for a CPU
    began = perf_counter()
    loaded = load(
        settings.model,
        revision=settings.revision,
        offline=settings.offline,
        device=settings.device,
        dtype=settings.dtype,
        weights=settings.weights,
        progress=progress,
        packing=packing,
    )
    load_s = perf_counter() - began
    config, network, own = loaded.config, loaded.network, loaded.config.own
    cuda = network.device.type == "cuda"
    if not cuda:  # pragma: no branch - a GPU skips it
        announce()
    kv = KVCache(
        shape_of(config),
        rules,
        dtype=network.dtype,
        device=network.device,
        kv=torch.int8 if settings.kv == "int8" else None,
        output=output_of(network),
        rotary=network.rotation,
        kernels=settings.kernels,
    )
    if kv.ops.name != "torch":
        network.use(kv.ops)
    if kv.ops.name == "triton":
        if eviction.budget.everything and eviction.may_evict:  # it may have to evict later
            kv.configure(eviction.under(USEFUL).rules())
            warm(kv, network)
            kv.configure(rules)
        if kv.ops.name == "triton":
            warm(kv, network)
        if kv.ops.name != "triton":
            network.use(None)
    recall = Recall(kv, settings.tier, settings.tier_dtype, free_memory)
    if settings.remember != "off":
        # Computed now, because the files may be replaced while the chat is open.
        identity: dict[str, object] = {
            "model": loaded.name if loaded.revision else loaded.folder.name,
            **digests(loaded.folder),
            "dtype": str(network.dtype),
            "form": settings.weights,
            "kernels": kv.ops.name,
            "device": network.device.type,
        }
        folder = cache_folder() / "prompts"
        recall.store = Store(folder, Budget.size(settings.remember) or 0, identity)

    packed = bool(packed_forms(config, settings.weights))

    def work(tokens: int) -> int:
        return workspace(config, tokens, kv.dtype.itemsize, cuda=cuda, packed=packed)

    def beside(tokens: int) -> int:
        return tier_beside(kv.shape, kv.dtype, tokens, recall.kind, recall.dtype, cuda=cuda)

    machine = Machine(kv.shape, kv.dtype, kv.kv, work, beside, cuda, kv.ops)
    return ChatSession(
        Engine(network, kv),
        loaded.tokenizer,
        loaded.template,
        settings,
        max_context=config.max_context,
        recall=recall,
        fit=lambda eviction, tokens, answer: machine.rows(
            eviction, tokens, answer, free_memory(network.device), kv.arena.nbytes
        ),
        own=own.why or Sampling(own.temperature, own.top_k, own.top_p, own.min_p),
        facts=Facts(
            model=loaded.name,
            revision=loaded.revision or "",
            device=str(network.device),
            dtype=str(network.dtype).removeprefix("torch."),
            kv=str(kv.kv).removeprefix("torch."),
            kernels=kv.ops.name,
            load_s=load_s,
            weight_bytes=network.weight_bytes,
            weights=config.form if settings.weights == "auto" and config.form else settings.weights,
            notes=(*config.notes, *loaded.tokenizer.notes),
        ),
    )


def packing_of(kernels: str, first: Callable[[], None] = lambda: None) -> Packing:
    """The kernels that pack weights on a CPU, for this value of `kernels`. C is compiled only when
    the first matrix is packed, so not for a model that does not exist; `first` is called before
    that."""
    import torch

    from minikv.kernels.dispatch import Kernels, choose

    @cache
    def chosen() -> Kernels:
        first()
        return choose(torch.device("cpu"), kernels, 64, torch.bfloat16)[0]  # 64: any head size

    return chosen


def settings_from(budget: int | str = "auto", **given: Any) -> Settings:
    """The settings of `minikv.load`: fields of `Settings`, and options of policies. Raises
    UsageError for any other name; the hint says where it belongs, or suggests others."""
    own = [*settings_of(Settings)]
    options = {name: given.pop(name) for name in [*given] if name not in own}
    known = {option.name for method in registry.methods() for option in method.options}
    known |= {option.name for part in registry.parts() for option in options_of(part)}
    for name in options:
        refuse_gone(name, f"`{name}`")
        if name in settings_of(Generation):
            raise UsageError(
                f"minikv.load() has no argument {name!r}", f"give it to chat.ask(..., {name}=...)"
            )
        if name in known:
            continue
        near = difflib.get_close_matches(name, [*own, *known], n=3, cutoff=0.6)
        raise UsageError(
            f"minikv.load() has no argument {quoted(name)}, and no policy has such an option",
            f"did you mean {' or '.join(near)}?" if near else f"it takes: {', '.join(own)}",
        )
    model = given.get("model")
    if isinstance(budget, bool) or not isinstance(budget, int | str):
        raise UsageError(
            f"`budget` must be a whole number or a text, got {quoted(budget)}",
            "give 'auto', tokens per head (512), a share of the prompt ('20%') or bytes ('64MiB')",
        )
    if isinstance(model, PathLike):
        given["model"] = fspath(model)
    return Settings(**given, budget=str(budget), options=options)


def shape_of(config: ModelConfig) -> Shape:
    """The sizes of a model that a cache must know."""
    from minikv.cache.stats import Shape

    return Shape(**{one.name: getattr(config, one.name) for one in fields(Shape)})


def prompt_rows(*, cuda: bool, head_dim: int) -> int | None:
    """`Kernels.prompt_rows` for this GPU or this processor; None if it has no preference."""
    import torch

    from minikv.kernels.attention import cudnn
    from minikv.kernels.native import choice

    if cuda:
        return cudnn.prompt_rows(torch.device("cuda"), head_dim)
    return choice.PROMPT_ROWS.get(choice.processor())


def workspace(
    config: ModelConfig,
    tokens: int,
    itemsize: int,
    *,
    cuda: bool,
    packed: bool = False,
) -> int:
    """About how many bytes the network needs at once for reading, in addition to weights and cache:
    the residual stream and the tables of positions in full, and twice the widest intermediates of
    one chunk.

    packed: the weights are packed; on a GPU a matrix is unpacked for each product of many rows."""
    from minikv.models.llama import chunk_rows

    asked = prompt_rows(cuda=cuda, head_dim=config.head_dim)
    rows = min(tokens, chunk_rows(cuda, itemsize, asked))
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention = 2 * (q + 2 * kv) + 2 * q
    chunk = rows * (2 * config.mlp + attention + 4 * config.hidden) * itemsize
    if cuda and asked is not None and tokens > rows:
        # Attention to a block, and the float32 sums before and after merging it.
        chunk += rows * q * (2 * 4 + itemsize)
    stream = tokens * (config.hidden + 2 * config.head_dim) * itemsize
    largest = max(wide * high for high, wide, _ in config.matrices.values())
    unpacked = itemsize * largest if packed and cuda else 0
    return unpacked + stream + chunk + 4 * config.vocab


def output_of(network: Llama) -> Callable[[int], Tensor]:
    """A function that returns a layer's W_O as [H, G, D, hidden], for policies that use the norms
    of projected values."""
    config = network.config

    def output(layer: int) -> Tensor:
        matrix = network.layers[layer].out.dense().T
        return matrix.view(config.kv_heads, -1, config.head_dim, config.hidden)

    return output
