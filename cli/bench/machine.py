"""The machine: its device, facts about it, a clock, and how fast its memory is.

A decode step must read every weight and every cached token once. So the time to read so many bytes
is its floor.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
from collections.abc import Callable, Mapping
from importlib import metadata
from statistics import median
from time import perf_counter
from typing import Any

import torch

import minikv
from minikv.cli.doctor import cpu_facts
from minikv.engine import threads
from minikv.errors import UsageError
from minikv.pages import Pages

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

    def each(self, work: Callable[[], object], rounds: int) -> list[float]:
        """Seconds of each of `rounds` runs, after one that is not measured."""
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


def bandwidth(device: torch.device) -> float:
    """Bytes a second that a decode step could read; a GPU's is what it copies with."""
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
    """What is measured, and the machine with its bandwidth."""
    plural = "" if facts["threads"] == 1 else "s"
    what = facts.get("gpu") or f"{facts['processor']}, {facts['threads']} thread{plural}"
    verb = "copies" if "gpu" in facts else "reads"
    return f"{about} on {what}, which {verb} {rate / 1e9:,.1f} GB/s"
