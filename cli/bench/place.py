"""Where a run computes: the device, the threads and the network that was asked for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from minikv.errors import UsageError

if TYPE_CHECKING:
    import torch


def cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_threads(threads: int) -> None:
    """Raise UsageError for more threads than cores, or fewer than none; 0 leaves it to torch."""
    if threads and not 1 <= threads <= cores():
        raise UsageError(
            f"--threads must be 1 to {cores()}, the cores that this process may use, got {threads}"
        )


def prepare(device: str, threads: int) -> torch.device:
    """The device of a flag, with so many threads at work. Raises ModelError for one that is not
    there."""
    import torch

    if threads:
        torch.set_num_threads(threads)
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = torch.device(device)
    if made.type == "cuda" and (made.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"no CUDA device for {device!r}", "use --device cpu")
    return made
