"""Memory for weights, keys and values: on a CPU in pages of 2 MiB, if the system has them. A decode
step reads all of it, which is faster from large pages (docs/measurements/README.md, Weights;
cpu.md, A step in one call)."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Empty = Callable[[Sequence[int], torch.dtype], Tensor]
"""(shape, dtype) -> a contiguous tensor that is not initialised."""

PAGE = 2 << 20
SLAB = 64 << 20  # bytes of a mapping for many tensors; unused pages take no memory
LARGE = 8 << 20  # a tensor of at least this many bytes has its own mapping
SMALL = 256 << 10  # a tensor of fewer bytes is in torch's own memory
_LINE = 64  # a tensor in a slab begins at a multiple of this many bytes


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The `Empty` that uses torch's own memory."""
    return torch.empty(tuple(shape), dtype=dtype)


def large(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Like `torch.empty`. On a CPU, a tensor of at least `LARGE` bytes is in pages of 2 MiB."""
    if math.prod(shape) * dtype.itemsize < LARGE:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return Pages(device).empty(shape, dtype)


def alone(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor on the CPU in its own mapping, whatever its size; on Linux."""
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(tuple(shape), dtype=dtype)
    return _in(*_own(size), shape, dtype)


def give_back() -> None:
    """Return freed memory of the process to the system. glibc keeps freed pieces of up to 32 MiB,
    such as the buffers for reading a prompt."""
    with contextlib.suppress(OSError, AttributeError):  # other C libraries have no such call
        ctypes.CDLL(None).malloc_trim(0)


class Pages:
    """Memory of a device for tensors with about the same lifetime: a mapping is freed with the last
    tensor in it. A tensor keeps its mapping alive, but does not prevent `close`; so mappings must
    not be closed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._slab: mmap.mmap | None = None
        self._used = 0  # bytes of the slab that are in use
        self._asks = device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE")

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Empty`; on the device."""
        size = math.prod(shape) * dtype.itemsize
        if self._asks and size >= SMALL:
            try:
                source, at = _own(size) if size >= LARGE else self._shared(size)
            except (OSError, ValueError):  # address space may be limited; the heap may need less
                self._asks, self._slab = False, None
            else:
                return _in(source, at, shape, dtype)
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def _shared(self, size: int) -> tuple[mmap.mmap, int]:
        """A slab with `size` free bytes, and their offset in it."""
        at = -(-self._used // _LINE) * _LINE
        if self._slab is None or at + size > len(self._slab):
            self._slab, at = _mapped(SLAB)
            _ask(self._slab, at, SLAB)
        self._used = at + size
        return self._slab, at


def _in(source: mmap.mmap, at: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The tensor at this offset of a mapping."""
    size = math.prod(shape) * dtype.itemsize
    flat = torch.frombuffer(source, dtype=torch.uint8, count=size, offset=at)
    return flat.view(dtype).view(tuple(shape))


def _own(size: int) -> tuple[mmap.mmap, int]:
    """A new mapping for one tensor, and the tensor's offset in it. The end that does not fill a
    large page is in small pages, because it would occupy a whole large one."""
    made, at = _mapped(size)
    if whole := size // PAGE * PAGE:
        _ask(made, at, whole)
    return made, at


def _mapped(size: int) -> tuple[mmap.mmap, int]:
    """A new mapping, and the offset in it of `size` bytes that begin at a page of 2 MiB."""
    made = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return made, -torch.frombuffer(made, dtype=torch.uint8, count=1).data_ptr() % PAGE


def _ask(made: mmap.mmap, at: int, size: int) -> None:
    """Request large pages for these bytes. Must be called before they are written."""
    with contextlib.suppress(OSError):  # a system without large pages uses small ones
        made.madvise(mmap.MADV_HUGEPAGE, at, size)
