"""Where a run computes: the device, the threads and the network that was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minikv.engine import threads
from minikv.errors import UsageError

if TYPE_CHECKING:
    import torch


def check_threads(count: int) -> None:
    """Raise UsageError for more threads than cores, or fewer than none; 0 is as many as allowed."""
    most = threads.allowed()
    if count and not 1 <= count <= most:
        raise UsageError(
            f"--threads must be 1 to {most}, the cores that this process may use, got {count}"
        )


def prepare(device: str, count: int) -> torch.device:
    """The device of a flag, with so many threads at work. Raises UsageError for one that is not
    there."""
    import torch

    threads.use(count)
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = torch.device(device)
    if made.type == "cuda" and (made.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"no CUDA device for {device!r}", "use --device cpu")
    enter(made)
    return made


def enter(device: torch.device) -> None:
    """Make a CUDA device the current one: Triton launches there."""
    import torch

    if device.type == "cuda" and (device.index or 0) != torch.cuda.current_device():
        torch.cuda.set_device(device.index or 0)
