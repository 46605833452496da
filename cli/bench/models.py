"""Networks to measure: random weights of given sizes, or a model's folder.

Random weights cost one pass over memory: one block of random numbers is repeated, each tensor from
another place in it, so that no two heads are equal. The values do not matter to a clock. They must
be finite and differ, since equal heads would share a budget evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minikv.chat.report import size
from minikv.cli.bench import machine
from minikv.cli.bench.shapes import Sizes
from minikv.errors import MemoryShortError
from minikv.models.config import ModelConfig
from minikv.models.linear import Int8, Plain, packs, split
from minikv.models.linear_gpu import Int8OnGpu, kept_on
from minikv.models.llama import Llama
from minikv.models.rope import RopeConfig
from minikv.models.weights import check_form, free_memory
from minikv.pages import Pages

POSITIONS = 1 << 20
"""Context of a random network: longer than any prompt that is measured."""

_BLOCK = 1_048_573  # a prime: no row of a matrix falls on the same place in the block twice
_STD = 0.02
_MATRICES = ("qkv", "out", "gate_up", "down")


@dataclass(frozen=True, slots=True)
class Spec:
    """Which network, and how it computes. `folder`: of a real model, instead of sizes; `kv`: number
    format of keys and values, auto (the dtype) or int8."""

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
    """The sizes of a loaded model."""
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
    """The network with its matrices in a format of --weights. Raises ModelError for a format that
    this machine or this dtype cannot have."""
    check_form(form, net.device, net.dtype)
    layers, logits = split(form)
    room = Pages(net.device).empty
    for layer in net.layers:
        for name in _MATRICES:
            matrix = getattr(layer, name)
            if isinstance(matrix, Plain):
                setattr(layer, name, kept_on(net.device, matrix, layers, room))
    if isinstance(net.head, Plain):
        made = kept_on(net.device, net.head, logits, room)
        if isinstance(made, Int8 | Int8OnGpu):
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
        if isinstance(part, Int8 | Int8OnGpu)
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
