"""A limit on this process's address space (`ulimit -v`), which other figures of free memory do not
know. Needs no torch."""

from __future__ import annotations

import sys

from minikv.models.errors import ModelTooLarge

_TORCH = 700 << 20
"""Bytes of address space that importing torch takes at the least (measured: 625 MiB without CUDA).
With less, the libraries that it loads end the process or never come back."""


def address_space() -> int | None:
    """Bytes that this process may still map; None where there is no limit, or nobody says."""
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
    """Raise ModelTooLarge where torch is still to be imported and has no room."""
    if "torch" in sys.modules:
        return
    free = address_space()
    if free is not None and free < _TORCH:
        raise ModelTooLarge(
            f"this process may use {free >> 20:,} MiB more of address space, and torch alone takes "
            f"{_TORCH >> 20:,} MiB",
            "raise the limit: `ulimit -v unlimited`",
        )
