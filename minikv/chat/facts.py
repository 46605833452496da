"""Model, number formats and device of a chat, for reports."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

import torch

from minikv.chat.report import DeviceMemory


@dataclass(frozen=True, slots=True)
class Facts:
    """For reports only: nothing here changes what is computed. load_s: seconds of loading. kv:
    number format of cached keys and values. weights: the value of --weights. notes: messages about
    the model for the user."""

    model: str = ""
    revision: str = ""
    device: str = "cpu"
    dtype: str = "float32"
    kv: str = "float32"
    kernels: str = "torch"
    load_s: float = 0.0
    weight_bytes: int = 0
    weights: str = "auto"
    notes: tuple[str, ...] = ()

    @property
    def form(self) -> str:
        """Number format of the matrices: plain, or the value of --weights."""
        return "plain" if self.weights == "auto" else self.weights


def device_memory(device: str) -> DeviceMemory:
    """On CUDA, what torch's allocator says. On a CPU, the peak resident memory of the process."""
    if device.startswith("cuda"):
        return DeviceMemory(
            torch.cuda.max_memory_allocated(device), torch.cuda.memory_reserved(device)
        )
    # Linux counts ru_maxrss in KiB, macOS in bytes.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return DeviceMemory(peak if sys.platform == "darwin" else peak * 1024, None)
