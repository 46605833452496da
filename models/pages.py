"""Memory for weights: on a CPU in pages of 2 MiB, where the system has them. A step reads every
matrix from one end to the other, which is quicker there (docs/measurements/README.md, Weights)."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Empty = Callable[[Sequence[int], torch.dtype], Tensor]
"""(shape, dtype) -> a contiguous tensor that nobody has written to."""

PAGE = 2 << 20
SLAB = 64 << 20  # bytes that are mapped for many tensors; what none has reached is not there
LARGE = 8 << 20  # bytes of a tensor that has a mapping of its own
SMALL = 256 << 10  # bytes of a tensor that may lie anywhere
_LINE = 64  # bytes: where a tensor may begin


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An `Empty` of torch's own memory."""
    return torch.empty(tuple(shape), dtype=dtype)


class Pages:
    """Memory of a device for tensors that live about as long as each other: a mapping goes back to
    the system with the last tensor in it. (A tensor keeps the mapping alive, but not open: nothing
    may close it.)"""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._slab: mmap.mmap | None = None
        self._used = 0  # bytes of the slab
        self._asks = device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE")

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Empty`; on the device."""
        size = math.prod(shape) * dtype.itemsize
        if self._asks and size >= SMALL:
            try:
                source, at = self._own(size) if size >= LARGE else self._shared(size)
            except (OSError, ValueError):  # a limit on address space: the heap may do with less
                self._asks, self._slab = False, None
            else:
                flat = torch.frombuffer(source, dtype=torch.uint8, count=size, offset=at)
                return flat.view(dtype).view(tuple(shape))
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def _own(self, size: int) -> tuple[mmap.mmap, int]:
        """A mapping for a tensor, and where in it. What does not fill a page has small ones: it
        would take a whole one."""
        made, at = _mapped(size)
        if whole := size // PAGE * PAGE:
            _ask(made, at, whole)
        return made, at

    def _shared(self, size: int) -> tuple[mmap.mmap, int]:
        """A slab, and where it has so many bytes."""
        at = -(-self._used // _LINE) * _LINE
        if self._slab is None or at + size > len(self._slab):
            self._slab, at = _mapped(SLAB)
            _ask(self._slab, at, SLAB)
        self._used = at + size
        return self._slab, at


def _mapped(size: int) -> tuple[mmap.mmap, int]:
    """A mapping, and where in it so many bytes begin that lie on whole pages of 2 MiB."""
    made = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return made, -torch.frombuffer(made, dtype=torch.uint8, count=1).data_ptr() % PAGE


def _ask(made: mmap.mmap, at: int, size: int) -> None:
    """For large pages, while nothing is written yet."""
    with contextlib.suppress(OSError):  # a system without: small ones, then
        made.madvise(mmap.MADV_HUGEPAGE, at, size)
