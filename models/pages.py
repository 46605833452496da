"""Memory for weights: on a CPU in pages of 2 MiB, where the system has them. A step reads every
matrix from one end to the other, and small pages slow that (docs/measurements/README.md)."""

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
SLAB = 64 << 20  # bytes that are mapped at a time; what is not used of them is never there
SMALL = 256 << 10  # bytes of a tensor that may lie anywhere
_LINE = 64  # bytes: where a tensor may begin


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An `Empty` of torch's own memory."""
    return torch.empty(tuple(shape), dtype=dtype)


class Pages:
    """Memory of a device for tensors that live about as long as each other: a slab goes back to the
    system with the last tensor in it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._slab: mmap.mmap | None = None
        self._used = 0
        self._large = device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE")

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Empty`; on the device, and for gradients, if asked, like any other tensor."""
        size = math.prod(shape) * dtype.itemsize
        if not self._large or size < SMALL or (at := self._take(size)) is None:
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        assert self._slab is not None
        flat = torch.frombuffer(self._slab, dtype=torch.uint8, count=size, offset=at)
        return flat.view(dtype).view(tuple(shape))

    def _take(self, size: int) -> int | None:
        """Where in the slab so many bytes are free now; None if there is no memory of this kind."""
        at = -(-self._used // _LINE) * _LINE
        if self._slab is None or at + size > len(self._slab):
            try:
                made = mmap.mmap(
                    -1, max(SLAB, size) + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                )
            except (OSError, ValueError):  # a limit on address space: the heap may do with less
                self._large = False
                return None
            with contextlib.suppress(OSError):  # a system without: small ones, then
                made.madvise(mmap.MADV_HUGEPAGE)
            begin = torch.frombuffer(made, dtype=torch.uint8, count=1).data_ptr()
            self._slab, at = made, -begin % PAGE
        self._used = at + size
        return at
