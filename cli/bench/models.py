"""Networks to measure, and one of them under a policy: the only place that knows how minikv's own
parts are put together here.

Random weights cost one pass over memory: the same block of random numbers again and again, each
tensor from another place in it, so that no two heads are alike. Their values do not matter to a
clock; that they are finite and differ does (heads that are alike would share a budget evenly).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from minikv.cache.kv_cache import KVCache
from minikv.cache.snapshot import CacheSnapshot
from minikv.cache.stats import CacheStats, Shape
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.report import size
from minikv.cli.bench import machine
from minikv.cli.bench.shapes import Sizes
from minikv.engine.engine import Engine
from minikv.engine.sampling import Sampling
from minikv.errors import MemoryShortError
from minikv.models.config import ModelConfig
from minikv.models.linear import Int8, Plain, kept, packs, split
from minikv.models.llama import Llama
from minikv.models.pages import Pages
from minikv.models.rope import RopeConfig
from minikv.models.weights import check_form, free_memory

POSITIONS = 1 << 20
"""Context of a random network: longer than any prompt that is measured."""

_BLOCK = 1_048_573  # a prime: no row of a matrix falls on the same place in the block twice
_STD = 0.02
_GREEDY = Sampling()
_MATRICES = ("qkv", "out", "gate_up", "down")


@dataclass(frozen=True, slots=True)
class Spec:
    """Which network, and how it computes. `folder` is a real model's, instead of sizes; `kv`: what
    keys and values are kept in, auto (the dtype) or int8."""

    sizes: Sizes | None
    folder: Path | None = None
    dtype: str = "bfloat16"
    device: str = "cpu"
    weights: str = "auto"
    kernels: str = "auto"
    kv: str = "auto"


def config_of(sizes: Sizes) -> ModelConfig:
    """A plain Llama of these sizes."""
    return ModelConfig(
        family="llama",
        layers=sizes.layers,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        hidden=sizes.hidden,
        mlp=sizes.mlp,
        vocab=sizes.vocab,
        norm_eps=1e-5,
        rope=RopeConfig(theta=sizes.theta),
        max_context=POSITIONS,
        windows=(None,) * sizes.layers,
        tied=sizes.tied,
    )


def sizes_of(config: ModelConfig) -> Sizes:
    """What a loaded model is like."""
    return Sizes(
        config.layers,
        config.hidden,
        config.heads,
        config.kv_heads,
        config.head_dim,
        config.mlp,
        config.vocab,
        config.rope.theta,
        config.tied,
    )


def network(spec: Spec) -> Llama:
    """The network of a spec, ready to run. Raises MemoryShortError before it allocates, and
    ModelError for a folder that cannot be loaded."""
    if spec.folder is not None:
        from minikv.models import load

        return load(
            spec.folder, device=spec.device, dtype=spec.dtype, weights=spec.weights, offline=True
        ).network
    return _kept(plain(spec), spec.weights)


def _kept(net: Llama, form: str) -> Llama:
    """With its matrices kept as --weights says. Raises ModelError for a form that this machine, or
    this dtype, cannot have."""
    check_form(form, net.device, net.dtype)
    layers, logits = split(form)
    room = Pages(net.device).empty
    for layer in net.layers:
        for name in _MATRICES:
            matrix = getattr(layer, name)
            if isinstance(matrix, Plain):
                setattr(layer, name, kept(matrix, layers, room))
    if isinstance(net.head, Plain) and isinstance(made := kept(net.head, logits, room), Int8):
        net.keep_head(made)
    return net


def plain(spec: Spec) -> Llama:
    """The random network with its matrices as they are in a checkpoint."""
    assert spec.sizes is not None
    device, dtype = torch.device(spec.device), getattr(torch, spec.dtype)
    needs, free = spec.sizes.parameters * dtype.itemsize, free_memory(device)
    if free is not None and needs > free:
        raise MemoryShortError(
            f"the weights need {size(needs)}, and {size(free)} are free",
            "a smaller --shape, or --dtype bfloat16"
            if dtype == torch.float32
            else "a smaller --shape",
        )

    def alone(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return Pages(device).empty(shape, dtype)

    # What will be packed must not lie beside what stays: its memory would stay, too.
    room = alone if packs(spec.weights) else None
    return fill(Llama(config_of(spec.sizes), device=device, dtype=dtype, room=room))


@torch.no_grad()
def fill(net: Llama, seed: int = 0) -> Llama:
    """Every matrix from one block of normal numbers, norms one."""
    generator = torch.Generator(net.device).manual_seed(seed)
    block = torch.randn(_BLOCK, generator=generator, device=net.device).mul_(_STD).to(net.dtype)
    for at, (name, tensor) in enumerate(net.tensors()):
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
            continue
        turned = block.roll(-at * 7919)
        flat = tensor.view(-1)
        whole = len(flat) // _BLOCK * _BLOCK
        flat[:whole].view(-1, _BLOCK).copy_(turned.expand(whole // _BLOCK, _BLOCK))
        flat[whole:].copy_(turned[: len(flat) - whole])
    return net


def step_bytes(net: Llama) -> int:
    """Bytes of weights that a decode step reads: all but the input embedding, unless it is the
    head as well."""
    return net.weight_bytes - (0 if net.config.tied else net.embedding.nbytes)


def reading_rate(net: Llama) -> float:
    """Bytes a second of a plain sum over the matrices that a step reads, scales left out, on a CPU:
    the better of two."""
    matrices = [getattr(layer, name) for layer in net.layers for name in _MATRICES]
    stored = [
        part.weight
        if isinstance(part, Plain)
        else part.quantised
        if isinstance(part, Int8)
        else part.packed
        for part in (*matrices, net.head)
    ]
    words = [tensor.view(-1).view(torch.int64) for tensor in stored if tensor.nbytes % 8 == 0]
    times = machine.Clock(net.device).each(lambda: [part.sum() for part in words], 2, warm=0)
    return sum(part.nbytes for part in words) / min(times)


def prompt(tokens: int, vocab: int, seed: int = 1) -> list[int]:
    """Random ids."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(vocab, (tokens,), generator=generator).tolist()
    return ids


def settle(device: torch.device) -> None:
    """Give back what is no longer used, so that the next system finds the machine as the first."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


class Cached:
    """A network under one policy: reads a prompt, writes tokens, tells what it holds."""

    def __init__(
        self,
        net: Llama,
        choice: EvictionConfig,
        kernels: str = "auto",
        kv: str = "auto",
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check()` is called between layers of a prompt and between steps, and may raise."""
        self.net, self.eviction, self.kernels, self.kv = net, choice, kernels, kv
        self.check = check
        self.clock = machine.Clock(net.device)
        self.engine = _engine(net, choice, kernels, kv)
        self._token = 0

    def read(self, ids: list[int], room: int = 256) -> float:
        """Seconds for a conversation that begins with this prompt."""
        self.engine.reset()
        return self.go_on(ids, room)

    def go_on(self, ids: list[int], room: int = 256) -> float:
        """Seconds for a further prompt of the same conversation."""

        def run() -> None:
            logits = self.engine.prompt(ids, lambda done, total: self.check(), room)
            self._token = int(logits.argmax())

        return self.clock(run)

    def write(self, steps: int) -> float:
        """Seconds for a step, mean over so many: greedy, each fed what the one before returned, as
        an answer is written. With random weights one token costs what another does."""
        vocab = self.net.config.vocab

        def run() -> None:
            for i in range(steps):  # none is launched beyond those that are counted
                self.check()
                self._token = self.engine.next(self._token, vocab, _GREEDY, 0, ahead=i + 1 < steps)

        return self.clock(run) / steps

    def twin(self) -> Cached:
        """Another one that evicts nothing while it writes; it is empty (see `copy`)."""
        none = replace(self.eviction, decode="none", decode_options={}, stride=0)
        return Cached(self.net, none, self.kernels, self.kv, self.check)

    @property
    def captured(self) -> bool:
        """Whether the last steps were one CUDA graph each."""
        return self.engine.captured

    @property
    def notices(self) -> list[str]:
        """Why something is slower than it could be."""
        said = self.engine.kv.notice
        return [*([said] if said else []), *self.engine.notices]

    def copy(self, of: Cached, room: int) -> None:
        """Hold the rows that `of` holds, without what its policy notes about them, and with room
        for so many steps: more would make attention run over more than it has to."""
        held, kv = of.engine.kv.snapshot(), self.engine.kv
        thin = {name: held.columns[name] for name in kv.arena.columns}
        prompt, step, budget, stride = self.eviction.policies()
        kv.restore(_roomy(replace(held, columns=thin), room), prompt, step, budget, stride)

    def stats(self) -> CacheStats:
        """Of the cache, counted from its tensors."""
        return self.engine.kv.stats()

    def step_rows(self) -> float:
        """Bytes of keys and values that a step reads."""
        arena = self.engine.kv.arena
        read = [name for name in arena.columns if name != "pos" and name not in arena.extra]
        return int(arena.held.sum()) * arena.row_nbytes(read)

    def close(self) -> None:
        """Give the cache back."""
        self.engine.reset()


def _roomy(held: CacheSnapshot, room: int) -> CacheSnapshot:
    """The same rows in segments that take exactly `room` more each."""
    old = held.layout
    capacity = old.length + room
    ends = capacity.flatten().cumsum(0).view_as(capacity)
    start = ends - capacity
    free_slot = torch.where(old.free_slot >= 0, old.free_slot - old.start + start, -1)
    return replace(
        held,
        region=(0, *ends[:, -1].tolist()),
        layout=replace(old, start=start, capacity=capacity, free_slot=free_slot),
    )


def longest(net: Llama, most: int) -> int | None:
    """The longest prompt, in whole thousands, that a full cache holds beside the weights.

    Tried, not computed: the cache of the length is allocated, with what a prompt needs besides.
    None on a CPU, which promises memory that it does not have.
    """
    if net.device.type != "cuda":
        return None
    cached = Cached(net, EvictionConfig.read("full", "none"))

    def holds(tokens: int) -> bool:
        kv, config = cached.engine.kv, net.config
        room = None
        try:
            kv.begin(tokens)
            numbers = tokens * config.hidden + net.rows * (2 * config.mlp + 4 * config.hidden)
            room = torch.empty(numbers, dtype=net.dtype, device=net.device)
        except torch.OutOfMemoryError:
            return False
        finally:
            del room
            kv.rollback()
            kv.reset()
            settle(net.device)
        return True

    low, high = 0, most // 1000
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(1000 * middle) else (low, middle - 1)
    return 1000 * low


def _engine(net: Llama, choice: EvictionConfig, kernels: str, kept_in: str) -> Engine:
    config = net.config

    def output(layer: int) -> Tensor:
        """W_O as [H, G, D, hidden]."""
        matrix = net.layers[layer].out.dense().T
        return matrix.view(config.kv_heads, -1, config.head_dim, config.hidden)

    prompt, step, budget, stride = choice.policies()
    kv = KVCache(
        Shape(
            config.layers,
            config.kv_heads,
            config.heads,
            config.head_dim,
            config.windows,
            config.max_context,
        ),
        prompt,
        step,
        budget,
        dtype=net.dtype,
        device=net.device,
        stride=stride,
        kv=torch.int8 if kept_in == "int8" else None,
        output=output,
        rotary=net.rotary.inverse,
        kernels=kernels,
    )
    net.use(kv.ops if kv.ops.name != "torch" else None)
    return Engine(net, kv)
