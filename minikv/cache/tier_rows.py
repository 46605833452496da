"""The rows of a tier in host memory, and the buffers for rows that are on disk."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minikv.cache.stats import Shape
from minikv.errors import MinikvError
from minikv.pages import alone

Columns = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""dtype and size of one row of each column, by name."""
_STEP = 1024  # rows; the memory of a layer is a multiple of this
SCALE = torch.float16  # its rounding error is about a tenth of that of the int8 codes


class TierError(MinikvError):
    """A tier cannot be read or written. rows: how many of its first rows are intact; None if it
    cannot be used any more."""

    def __init__(self, message: str, rows: int | None = None) -> None:
        super().__init__(message)
        self.rows = rows


class Memory:
    """Allocates columns on the host, or on the device "meta" without memory.

    For a GPU they are pinned, so that it can copy from and to them while it computes. torch's own
    pinned memory takes up to twice the bytes, because torch rounds them up to a power of two, and
    is never freed.
    """

    def __init__(self, device: torch.device, runtime: Any = None) -> None:
        """device: of the network. runtime: pins the memory; for a GPU `torch.cuda.cudart()`."""
        self._where = "meta" if device.type == "meta" else "cpu"
        if device.type == "cuda":  # pragma: no cover - CUDA only
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._runtime = runtime
        self._pinned: set[int] = set()  # addresses
        weakref.finalize(self, _unpin, runtime, self._pinned)

    @property
    def whole(self) -> bool:
        """Whether a column takes memory before it is touched."""
        return self._runtime is not None

    def columns(self, kinds: Columns, heads: int, rows: int) -> dict[str, Tensor]:
        """Columns [heads, rows, ...] that are not initialised. Raises torch's error if memory runs
        out or cannot be pinned."""
        made: dict[str, Tensor] = {}
        try:
            with torch.inference_mode(False):
                for name, (dtype, size) in kinds.items():
                    made[name] = self._empty((heads, rows, *size), dtype)
        except BaseException:
            self.release(made)
            raise
        return made

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self._runtime is None:
            return torch.empty(tuple(shape), dtype=dtype, device=self._where)
        made = alone(shape, dtype)  # whole pages are pinned
        if made.nbytes:
            status = self._runtime.cudaHostRegister(made.data_ptr(), made.nbytes, 0)
            if status != self._runtime.cudaError.success:
                _forget_error()
                raise torch.OutOfMemoryError(
                    f"{made.nbytes:,} bytes of memory cannot be pinned: {status}"
                )
            self._pinned.add(made.data_ptr())
        return made

    def release(self, columns: Mapping[str, Tensor]) -> None:
        """Unpin these columns. Nothing may use them any more, not even a copy under way."""
        mine = {column.data_ptr() for column in columns.values()} & self._pinned
        self._pinned -= mine
        _unpin(self._runtime, mine)


def _forget_error() -> None:
    """Clear CUDA's last error, for which the next launch would raise."""
    if torch.cuda.is_available():  # pragma: no cover - CUDA only
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")


def _unpin(runtime: Any, begins: Iterable[int]) -> None:
    for begin in begins:
        runtime.cudaHostUnregister(begin)


class Slots:
    """Memory for one or two of many layers: layer i is in slot i modulo the number of slots.

    columns: those of each slot.

    fill(layer, columns): starts to fill in a layer, after all earlier fills, and returns a mark.
    wait(mark): waits until that is done. While one of two slots is in use, the next layer is filled
    in the other one.
    """

    def __init__(
        self,
        slots: Sequence[Mapping[str, Tensor]],
        layers: int,
        fill: Callable[[int, Mapping[str, Tensor]], Any],
        wait: Callable[[Any], object],
    ) -> None:
        self.columns, self._layers, self._fill, self._wait = slots, layers, fill, wait
        self._held: list[tuple[int, Any]] = [(-1, None)] * len(slots)  # layers, and their marks

    def layer(self, layer: int) -> Mapping[str, Tensor]:
        """The layer's columns, filled; valid until the next call for another layer."""
        slot = self._begun(layer)
        self._wait(self._held[slot][1])
        if len(self.columns) > 1 and layer + 1 < self._layers:
            self._begun(layer + 1)
        return self.columns[slot]

    def _begun(self, layer: int) -> int:
        """The layer's slot, which is filled or being filled."""
        slot = layer % len(self.columns)
        if self._held[slot][0] != layer:
            self._held[slot] = layer, self._fill(layer, self.columns[slot])
        return slot


class RamRows:
    """The columns of a tier: [H, N] or [H, N, D] by name for each layer, in host memory.
    `minikv.cache.tier_file.FileRows` has the same methods.

    A prompt calls `reserve`; then, layer by layer, `read`, and `write` for its new rows; finally
    `commit`, or `drop` if it failed.

    kind: "ram" or "file". apart: every layer has its own memory, so the next layer may be read or
    written while a copy of this one is under way.
    """

    kind = "ram"
    apart = True

    def __init__(
        self,
        layers: int,
        heads: int,
        columns: Columns,
        most: int,
        device: torch.device | None = None,
    ) -> None:
        """columns: dtype and size of one row of each. most: the largest number of rows that can
        ever be needed. device: of the network, by default the CPU."""
        self._heads, self._columns, self._most = heads, columns, most
        self.memory = Memory(device or torch.device("cpu"))
        self._layers = [self._blank(0) for _ in range(layers)]
        self._capacity = 0  # rows
        self._used = 0  # rows reserved so far: memory after them was never touched

    def _blank(self, rows: int) -> dict[str, Tensor]:
        return self.memory.columns(self._columns, self._heads, rows)

    def reserve(self, rows: int, have: int = 0) -> None:
        """Begin a prompt after which there will be `rows` rows. The first `have` are stored and
        stay, even after an error; stored rows after them are discarded. Grows layer by layer, so
        that at most one layer exists twice at a time."""
        if rows > self._capacity:
            capacity = self.room(rows, self._most)
            for layer, old in enumerate(self._layers):
                new = self._blank(capacity)
                for name, column in old.items():
                    new[name][:, :have] = column[:, :have]
                self._layers[layer] = new
                self.memory.release(old)
            self._capacity, self._used = capacity, have
        self._used = max(self._used, rows)

    @staticmethod
    def room(rows: int, most: int) -> int:
        """How many rows to allocate when `rows` are needed: a quarter more, so that the next turns
        fit too."""
        return max(rows, min(most, -(-(rows + rows // 4) // _STEP) * _STEP))

    def read(self, layer: int, count: int) -> Mapping[str, Tensor]:
        """Memory for the first `count` rows of a layer, with the stored rows filled in. Valid until
        the next call for another layer. count: at most the rows that were reserved."""
        assert count <= self._layers[layer]["k"].shape[1]
        return {name: column[:, :count] for name, column in self._layers[layer].items()}

    def write(self, layer: int, begin: int, columns: Mapping[str, Tensor]) -> None:
        """Store the layer's rows from `begin` on, the `have` of `reserve`. The columns may be the
        memory that `read` returned. Does not wait for a GPU."""
        put(self._layers[layer], begin, columns, wait=False)

    def commit(self, rows: int, ids: Sequence[int] = ()) -> None:
        """Make the first `rows` rows final. ids: their token ids, if known. Raises TierError if
        rows could not be written; then the caller must not count them."""

    def drop(self) -> None:
        """End the prompt: discard rows that were not committed. Cannot fail."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory, or of the file, that the rows take. Pinned memory counts whole, other
        memory once it was touched."""
        if self.memory.whole:
            return sum(column.nbytes for layer in self._layers for column in layer.values())
        return len(self._layers) * self._heads * self._used * width(self._columns)


def put(
    into: Mapping[str, Tensor], begin: int, columns: Mapping[str, Tensor], *, wait: bool
) -> None:
    """Write rows to `into` from row `begin` on, unless they are already there. `wait`: return only
    when that is done, also if a GPU does it."""
    for name, rows in columns.items():
        place = into[name][:, begin : begin + rows.shape[1]]
        if place.data_ptr() != rows.data_ptr():
            copy_heads(place, rows, wait=wait)


def copy_heads(into: Tensor, rows: Tensor, *, wait: bool) -> None:
    """Copy rows [H, N, ...] between the host and a device, head by head: each head's rows are
    contiguous, so the copy needs no intermediate buffer. `wait`: return when the copy is done."""
    if into.device == rows.device:
        into.copy_(rows)
        return
    for place, head in zip(into, rows, strict=True):  # pragma: no cover - between host and CUDA
        place.copy_(head, non_blocking=not wait)


def columns_of(
    shape: Shape, dtype: torch.dtype, coded: bool
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The columns of a tier: (dtype, size of one row) by name."""
    scale: tuple[torch.dtype, tuple[int, ...]] = (SCALE, ())
    made = dict.fromkeys(("k", "v"), (torch.int8 if coded else dtype, (shape.head_dim,)))
    return made | (dict.fromkeys(("k_scale", "v_scale"), scale) if coded else {})


def row_nbytes(shape: Shape, dtype: torch.dtype, coded: bool = False) -> int:
    """Bytes that a tier needs for one token, over all layers and heads."""
    return width(columns_of(shape, dtype, coded)) * shape.layers * shape.kv_heads


def width(columns: Columns) -> int:
    """Bytes of one row of all columns."""
    return sum(dtype.itemsize * math.prod(size) for dtype, size in columns.values())
