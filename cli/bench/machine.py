"""The machine: facts, clocks, its measured rates of reading, copying and multiplying, and the least
time that these rates allow (the floor).

A decode step must read every weight and every cached token once. A prompt needs the products with
every matrix, and attention.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import minikv
from minikv.cli.doctor import cpu_facts
from minikv.engine import threads
from minikv.errors import UsageError
from minikv.pages import Pages

_MIB = 1 << 20
_LIBRARIES = ("torch", "triton", "transformers", "llama-cpp-python", "openvino-genai", "numpy")


def prepare(device: str, count: int) -> torch.device:
    """Set the number of threads (0: as many as the process may use), and make the device of a flag
    the current one; returns it. Raises UsageError if there is no such device, or for more threads
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
    """Seconds that work takes on a device: by CUDA events, or by the wall clock on a CPU."""

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

    def each(self, work: Callable[[], object], rounds: int, warm: int = 1) -> list[float]:
        """Seconds of each of `rounds` runs, after `warm` runs that are not measured."""
        for _ in range(warm):
            work()
        return [self(work) for _ in range(rounds)]


def facts(device: torch.device) -> dict[str, object]:
    """Facts about the machine. They name no person and no folder."""
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
            "capability": f"{about.major}.{about.minor}",
            "multiprocessors": about.multi_processor_count,
            "l2": l2_bytes(device),
            "cuda": torch.version.cuda,
        }
    return found


def versions() -> dict[str, str | None]:
    """The versions of everything whose speed is shown; None: not installed."""
    found: dict[str, str | None] = dict.fromkeys(("minikv", "python", *_LIBRARIES))
    found |= {"minikv": minikv.__version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def l2_bytes(device: torch.device) -> int:
    """Bytes of the GPU's L2 cache."""
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 * _MIB))


# -- rates ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rates:
    """The machine's measured rates, in bytes and flops a second.

    read: with all threads. copy: bytes read plus bytes written. matmul and matmul_fp32: products of
    large square matrices, in bfloat16 and float32.
    """

    read: float
    copy: float
    matmul: float
    matmul_fp32: float
    on_gpu: bool

    @property
    def stream(self) -> float:
        """Bytes a second that a decode step could read; a GPU's is what it copies with."""
        return self.copy if self.on_gpu else self.read

    def product(self, dtype: str) -> float:
        """Flops a second of a large product in a dtype."""
        return self.matmul_fp32 if dtype == "float32" else self.matmul


def measure(device: torch.device, rounds: int = 5, small: bool = False) -> Rates:
    """Measure the rates. `small` uses buffers that fit into caches: for tests only."""
    gpu = device.type == "cuda"
    size, side = (_MIB, 128) if small else (1024 * _MIB, 8192) if gpu else (256 * _MIB, 1536)
    half, full = (
        product_rate(device, dtype, side, rounds) for dtype in (torch.bfloat16, torch.float32)
    )
    copied = copy_rate(device, size, rounds)
    if gpu:
        return Rates(copied, copied, half, full, True)
    return Rates(read_rate(size, rounds), copied, half, full, False)


def read_rate(size: int, rounds: int) -> float:
    """Bytes a second that the processor reads from main memory: the better of two reductions."""
    words = Pages(torch.device("cpu")).empty((size // 8,), torch.int64).fill_(1)
    numbers = words.view(torch.float32)
    clock = Clock(torch.device("cpu"))
    return size / min(*clock.each(words.sum, rounds), *clock.each(numbers.amax, rounds))


def copy_rate(device: torch.device, size: int, rounds: int) -> float:
    """Bytes read plus bytes written a second, by a plain copy of `size` bytes."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / _typical(device, lambda: target.copy_(source), rounds)


def product_rate(device: torch.device, dtype: torch.dtype, side: int, rounds: int) -> float:
    """Flops a second of a product of two square matrices."""
    a, b = (normal(device, seed, dtype, side, side) for seed in (1, 2))
    out = torch.empty_like(a)
    return 2 * side**3 / _typical(device, lambda: torch.mm(a, b, out=out), rounds)


def attention_rate(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, size: int, tokens: int
) -> float:
    """Flops a second of torch's causal attention: `heads` query heads of `size` over `tokens`."""
    q = normal(device, 3, dtype, 1, heads, tokens, size)
    k, v = (normal(device, seed, dtype, 1, kv_heads, tokens, size) for seed in (4, 5))

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads != heads)

    return 4 * heads * size * (tokens * (tokens + 1) // 2) / _typical(device, attend, 3)


def _typical(device: torch.device, work: Callable[[], object], rounds: int) -> float:
    """Seconds: the median on a GPU, the best on a CPU, where other processes interfere."""
    times = Clock(device).each(work, rounds)
    return median(times) if device.type == "cuda" else min(times)


def normal(device: torch.device, seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Normally distributed numbers that follow from `seed`."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def settle(device: torch.device) -> None:
    """Free unused memory, so that the next system starts under the same conditions as the first."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


# -- results --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a system or a kernel, one per round. floor_s: the least that the hardware allows,
    None if it is not known. facts: what the JSON has beside them, by its names."""

    times: Sequence[float]
    floor_s: float | None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The median over rounds."""
        return median(self.times)

    @property
    def share(self) -> float | None:
        """The floor's part of the time: 1 would be the hardware's limit."""
        return None if self.floor_s is None else self.floor_s / self.seconds

    def record(self) -> dict[str, Any]:
        """Ready for JSON."""
        times = {"times": list(self.times), "floor_s": self.floor_s, "seconds": self.seconds}
        return {**self.facts, **times, "share_of_floor": self.share}


def header(facts: Mapping[str, object], rates: Rates, about: str) -> str:
    """The machine and its rates, two lines."""
    plural = "" if facts["threads"] == 1 else "s"
    what = facts.get("gpu") or f"{facts['processor']}, {facts['threads']} thread{plural}"
    speeds = f"copy {rate(rates.copy)}" if rates.on_gpu else f"read {rate(rates.read)}"
    products = f"products {flops(rates.matmul)} bf16, {flops(rates.matmul_fp32)} fp32"
    return f"{about} on {what}\n{speeds} · {products}"


def number(value: float) -> str:
    """A number with three significant digits."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(share: float | None) -> str:
    """ "-" for None."""
    return "-" if share is None else f"{share:.0%}"


def rate(per_second: float) -> str:
    """Bytes a second."""
    if per_second >= 1e12:
        return f"{per_second / 1e12:.2f} TB/s"
    return f"{per_second / 1e9:.1f} GB/s"


def flops(per_second: float) -> str:
    """Floating point operations a second."""
    if per_second >= 1e13:
        return f"{per_second / 1e12:.0f} TFLOP/s"
    return f"{per_second / 1e9:,.0f} GFLOP/s"
