"""The device and the threads that a run computes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minikv.engine import threads
from minikv.errors import UsageError

if TYPE_CHECKING:
    import torch


def check_threads(count: int) -> None:
    """Raise UsageError for a negative number, or for more threads than cores; 0: all allowed."""
    most = threads.allowed()
    if count and not 1 <= count <= most:
        raise UsageError(
            f"--threads must be 1 to {most}, the cores that this process may use, got {count}"
        )


def prepare(device: str, count: int) -> torch.device:
    """Set the number of threads, and make the device of a flag the current one; returns it. Raises
    UsageError if there is no such device."""
    import torch

    threads.use(count)
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = torch.device(device)
    if made.type == "cuda":
        if (made.index or 0) >= torch.cuda.device_count():
            raise UsageError(f"no CUDA device for {device!r}", "use --device cpu")
        torch.cuda.set_device(made.index or 0)  # Triton launches on the current device
    return made
