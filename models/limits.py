"""The limit of this process's address space (`ulimit -v`), which other figures of free memory
ignore. Does not import torch."""

from __future__ import annotations

import sys

from minikv.models.errors import ModelTooLarge

_TORCH = 700 << 20
"""The bytes of address space that importing torch needs (measured: 625 MiB without CUDA). With
less, the libraries that it loads abort the process or hang."""


def address_space() -> int | None:
    """Bytes of address space that this process may still use; None if there is no limit or it is
    not known."""
    try:
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit == resource.RLIM_INFINITY:
            return None
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
    except (ImportError, OSError, ValueError, IndexError):
        return None
    return max(0, limit - used)


def refuse_without_torch() -> None:
    """Raise ModelTooLarge if torch is not imported yet and there is no room for it."""
    if "torch" in sys.modules:
        return
    free = address_space()
    if free is not None and free < _TORCH:
        raise ModelTooLarge(
            f"this process may use {free >> 20:,} MiB more of address space, and torch alone takes "
            f"{_TORCH >> 20:,} MiB",
            "raise the limit: `ulimit -v unlimited`",
        )
