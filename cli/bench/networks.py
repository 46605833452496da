"""The machine, and networks with random weights, for `minikv bench`."""

from __future__ import annotations

import contextlib
import gc
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

import minikv
from minikv.chat.report import size
from minikv.checks import guess
from minikv.cli.doctor import cpu_facts
from minikv.engine import threads
from minikv.errors import MemoryShortError, UsageError
from minikv.models.config import ModelConfig
from minikv.models.linear import TORCH, Int8, Plain, kept, split
from minikv.models.llama import Llama
from minikv.models.rope import RopeConfig
from minikv.models.tensors import tensors_of
from minikv.models.weights import check_form, free_memory
from minikv.pages import Pages

_LIBRARIES = ("torch", "triton", "transformers", "llama-cpp-python", "openvino-genai", "numpy")


def prepare(device: str, count: int) -> torch.device:
    """Set the number of threads (0: as many as the process may use), make the device of a flag the
    current one, and return it. Raises UsageError if there is no such device, or for more threads
    than cores."""
    most = threads.allowed()
    if count and not 1 <= count <= most:
        raise UsageError(
            f"--threads must be 1 to {most}, the cores that this process may use, got {count}"
        )
    threads.use(count)
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = torch.device(device)
    if made.type == "cuda":
        if (made.index or 0) >= torch.cuda.device_count():
            raise UsageError(f"no CUDA device for {device!r}", "use --device cpu")
        torch.cuda.set_device(made.index or 0)  # Triton launches on the current device
    return made


class Clock:
    """Measures the seconds of work on a device: by CUDA events, or by the wall clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, work: Callable[[], object]) -> float:
        """Run it once and wait for the device."""
        if self.device.type == "cuda":
            event: Any = torch.cuda.Event  # torch has no types for it
            begin, end = event(enable_timing=True), event(enable_timing=True)
            torch.cuda.synchronize(self.device)
            begin.record()
            work()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3
        began = perf_counter()
        work()
        return perf_counter() - began

    def each(self, work: Callable[[], object], rounds: int) -> list[float]:
        """Seconds of each of `rounds` runs, after one that is not measured."""
        work()
        return [self(work) for _ in range(rounds)]


def facts(device: torch.device) -> dict[str, object]:
    """Facts about the machine, without names of persons or folders."""
    pages = os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in os.sysconf_names else None
    found: dict[str, object] = {
        "system": platform.system(),
        "processor": cpu_facts()[0] or platform.processor() or platform.machine(),
        "cores": threads.allowed(),
        "threads": torch.get_num_threads(),
        "memory": None if pages is None else pages * os.sysconf("SC_PAGE_SIZE"),
        "device": str(device),
    }
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": about.name,
            "gpu_memory": about.total_memory,
            "cuda": torch.version.cuda,
        }
    return found


def versions() -> dict[str, str | None]:
    """The versions of all measured systems; None: not installed."""
    found: dict[str, str | None] = dict.fromkeys(("minikv", "python", *_LIBRARIES))
    found |= {"minikv": minikv.__version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def bandwidth(device: torch.device) -> float:
    """Bytes a second that a decode step could read; for a GPU, the rate of a copy."""
    return copy_rate(device, 1 << 30, 5) if device.type == "cuda" else read_rate(1 << 28, 5)


def read_rate(size: int, rounds: int) -> float:
    """Bytes a second that the processor reads from main memory, with all threads: the better of two
    reductions."""
    words = Pages(torch.device("cpu")).empty((size // 8,), torch.int64).fill_(1)
    numbers = words.view(torch.float32)
    clock = Clock(torch.device("cpu"))
    return size / min(*clock.each(words.sum, rounds), *clock.each(numbers.amax, rounds))


def copy_rate(device: torch.device, size: int, rounds: int) -> float:
    """Bytes read plus bytes written a second, by a plain copy of `size` bytes."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / median(Clock(device).each(lambda: target.copy_(source), rounds))


def settle(device: torch.device) -> None:
    """Free unused memory, so that the next system starts under the same conditions as the first."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def header(facts: Mapping[str, object], rate: float, about: str) -> str:
    """The title of the measurement, with the machine and its bandwidth."""
    plural = "" if facts["threads"] == 1 else "s"
    what = facts.get("gpu") or f"{facts['processor']}, {facts['threads']} thread{plural}"
    verb = "copies" if "gpu" in facts else "reads"
    return f"{about} on {what}, which {verb} {rate / 1e9:,.1f} GB/s"


POSITIONS = 1 << 21
"""Context of a random network: longer than any measured prompt."""

_BLOCK = 1_048_573  # a prime, so that rows of a matrix begin at different places in the block
_STD = 0.02
_MATRICES = ("qkv", "out", "gate_up", "down")


def llama(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    mlp: int,
    vocab: int,
    theta: float = 1e4,
    tied: bool = False,
) -> ModelConfig:
    """The configuration of a Llama-shaped network. `heads` are query heads, H * G."""
    return ModelConfig(
        family="llama",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=mlp,
        vocab=vocab,
        norm_eps=1e-5,
        rope=RopeConfig(theta=theta),
        max_context=POSITIONS,
        windows=(None,) * layers,
        tied=tied,
    )


SHAPES: Mapping[str, ModelConfig] = {
    "llama-3-8b": llama(32, 4096, 32, 8, 128, 14336, 128256, 5e5),
    "llama-2-7b": llama(32, 4096, 32, 32, 128, 11008, 32000),
    "mistral-7b": llama(32, 4096, 32, 8, 128, 14336, 32768, 1e6),  # v0.3: no sliding window
    "llama-3.2-1b": llama(16, 2048, 32, 8, 64, 8192, 128256, 5e5, tied=True),
    "tinyllama": llama(22, 2048, 32, 4, 64, 5632, 32000),  # M of docs/measurements
    "smollm2-135m": llama(30, 576, 9, 3, 64, 1536, 49152, 1e5, tied=True),
    "s": llama(16, 768, 12, 4, 64, 2048, 32000, 5e5),  # S of docs/measurements
    "tiny": llama(2, 64, 4, 2, 16, 128, 256),
}


def find(name: str) -> ModelConfig:
    """The sizes under a name, in any case. Raises UsageError."""
    found = SHAPES.get(name.lower())
    if found is None:
        hint = f"{guess(name.lower(), SHAPES)}shapes: {', '.join(SHAPES)}"
        raise UsageError(f"unknown shape {name!r}", hint)
    return found


@dataclass(frozen=True, slots=True)
class Spec:
    """Describes a network. `folder`: that of a real model, instead of sizes; `weights`: a value of
    --weights."""

    sizes: ModelConfig | None = None
    folder: Path | None = None
    dtype: str = "bfloat16"
    device: str = "cpu"
    weights: str = "auto"


def network(spec: Spec) -> Llama:
    """The network of a spec, ready to run. Raises MemoryShortError before anything is allocated,
    and ModelError for a folder that cannot be loaded or a format that this machine cannot
    compute."""
    if spec.folder is not None:
        from minikv.models import load

        return load(
            spec.folder, device=spec.device, dtype=spec.dtype, weights=spec.weights, offline=True
        ).network
    net = plain(spec)
    check_form(spec.weights, net.device, net.dtype, net.config)
    layers, logits = split(spec.weights)
    room, packing = Pages(net.device).empty, TORCH if net.device.type == "cpu" else None
    for layer in net.layers:
        for name in _MATRICES:
            matrix = getattr(layer, name)
            if isinstance(matrix, Plain):
                setattr(layer, name, kept(matrix, layers, room, packing))
    if isinstance(net.head, Plain):
        made = kept(net.head, logits, room, packing)
        if isinstance(made, Int8):
            net.keep_packed("head", made)
    return net


def plain(spec: Spec) -> Llama:
    """The random network with unpacked matrices."""
    assert spec.sizes is not None
    device, dtype = torch.device(spec.device), getattr(torch, spec.dtype)
    needs, free = spec.sizes.parameters * dtype.itemsize, free_memory(device)
    if free is not None and needs > free:
        raise MemoryShortError(
            f"the weights need {size(needs)}, and {size(free)} are free",
            "a smaller --shape" + (", or --dtype bfloat16" if dtype == torch.float32 else ""),
        )

    def alone(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return Pages(device).empty(shape, dtype)

    # Matrices that will be packed must not share pages with others, or their memory would not be
    # freed.
    room = alone if {"int8", "int4"}.intersection(split(spec.weights)) else None
    return fill(Llama(spec.sizes, device=device, dtype=dtype, room=room))


@torch.no_grad()
def fill(net: Llama, seed: int = 0) -> Llama:
    """Every matrix from one block of normal numbers, norms one."""
    generator = torch.Generator(net.device).manual_seed(seed)
    block = torch.randn(_BLOCK, generator=generator, device=net.device).mul_(_STD).to(net.dtype)
    for at, (name, tensor) in enumerate(tensors_of(net)):
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
    """Bytes of weights that a decode step reads: all but the input embedding, unless it is also the
    head."""
    return net.weight_bytes - (0 if net.config.tied else net.embedding.nbytes)


def prompt(tokens: int, vocab: int, seed: int = 1) -> list[int]:
    """Random ids."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(vocab, (tokens,), generator=generator).tolist()
    return ids
