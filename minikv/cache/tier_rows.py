"""The storage of a tier's rows: its interface `Rows`, `RamRows` in host memory, and `LentRows` of
another chat."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from minikv.cache.stats import Shape
from minikv.errors import MinikvError
from minikv.pages import alone, empty

Columns = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""By name: dtype and size of one row of each column."""
_STEP = 1024  # rows; the memory of a layer is a multiple of it
_SCALES = ("k_scale", "v_scale")
SCALE = torch.float16  # its rounding error is about a tenth of that of the int8 codes


class TierError(MinikvError):
    """A tier cannot be read or written. rows: how many of its first rows are intact; None if it
    cannot be used any more."""

    def __init__(self, message: str, rows: int | None = None) -> None:
        super().__init__(message)
        self.rows = rows


class Rows(Protocol):
    """The storage of a tier's columns: [H, N] or [H, N, D] for each layer, on the host.

    A prompt calls `reserve`; then, layer by layer, `read`, and `write` for its new rows; at last
    `commit`, or `drop` if it failed.

    kind: "ram" or "file". apart: every layer has its own memory, so the next layer may be read or
    written while a copy of this one is under way.
    """

    kind: str
    apart: bool

    def reserve(self, rows: int, have: int = 0) -> None:
        """Begin a prompt after which there will be `rows` rows. The first `have` are stored and
        stay, also after an error; stored rows after them are discarded."""
        ...

    def first(self, layer: int) -> int:
        """How many first rows of a layer are not stored."""
        ...

    def read(self, layer: int, count: int) -> Mapping[str, Tensor]:
        """Memory for the first `count` rows of a layer, but those below `first`, in which the
        stored rows are filled. Valid until the next call for another layer."""
        ...

    def write(self, layer: int, begin: int, columns: Mapping[str, Tensor]) -> None:
        """Store the layer's rows from `begin` on: the `have` of `reserve`, or `first` if that is
        larger. The columns may be the memory that `read` returned."""
        ...

    def commit(self, rows: int, ids: Sequence[int] = ()) -> None:
        """Make the first `rows` rows final. ids: their token ids, if known. Raises TierError if
        rows could not be written; then the caller must not count them."""
        ...

    def drop(self) -> None:
        """End the prompt: discard rows that were not committed. Cannot fail."""
        ...

    def clear(self) -> None:
        """Discard all rows and free their memory."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of memory, or of the file, that the rows take."""
        ...

    @property
    def working(self) -> int:
        """Bytes of memory in addition to `nbytes`, while a prompt is read."""
        ...


class Pinned:
    """Host memory that a GPU copies from and to while it computes. torch's own pinned memory takes
    up to twice the bytes, as it rounds them up to a power of two, and is never given back."""

    def __init__(self, runtime: Any) -> None:
        """runtime: `torch.cuda.cudart()`."""
        self._runtime = runtime
        self._begins: set[int] = set()
        weakref.finalize(self, _unpin, runtime, self._begins)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor that is not initialised. Raises OutOfMemoryError if the memory cannot be
        pinned."""
        made = alone(shape, dtype)  # pages are pinned whole
        if made.nbytes:
            status = self._runtime.cudaHostRegister(made.data_ptr(), made.nbytes, 0)
            if status != self._runtime.cudaError.success:
                _forget_error()
                raise torch.OutOfMemoryError(
                    f"{made.nbytes:,} bytes of memory cannot be pinned: {status}"
                )
            self._begins.add(made.data_ptr())
        return made

    def release(self, tensors: Sequence[Tensor]) -> None:
        """The tensors are not used any more: neither here nor by a copy that is under way."""
        mine = {tensor.data_ptr() for tensor in tensors} & self._begins
        self._begins -= mine
        _unpin(self._runtime, mine)


def pinned_memory() -> Pinned:  # pragma: no cover - CUDA only
    """Memory that is pinned with CUDA."""
    return Pinned(torch.cuda.cudart())  # type: ignore[no-untyped-call]


def _forget_error() -> None:
    """CUDA notes a call that failed, and the next launch would raise for it."""
    if torch.cuda.is_available():  # pragma: no cover - CUDA only
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")


def _unpin(runtime: Any, begins: set[int]) -> None:
    for begin in begins:
        runtime.cudaHostUnregister(begin)


def _on_meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


class RamRows:
    """`Rows` in host memory, pinned for a device that is a GPU.

    With `windows`, the rows are those of one prompt (`have` of `reserve` is 0), and of a layer with
    a sliding window only rows that the next token sees are stored.
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
        windows: Sequence[int | None] | None = None,
    ) -> None:
        """columns: dtype and size of one row of each. most: the greatest number of rows that can
        ever be needed. device: of the network, by default the CPU."""
        self._heads, self._columns, self._most = heads, columns, most
        self._windows = windows or (None,) * layers
        self._meta = device is not None and device.type == "meta"  # nothing is allocated
        gpu = device is not None and device.type == "cuda"
        self._pinned = pinned_memory() if gpu else None
        self._layers = [self._blank(0) for _ in range(layers)]
        self._capacity = 0  # rows
        self._used = 0  # rows that were reserved: memory after them was never touched

    def _blank(self, rows: int) -> dict[str, Tensor]:
        make = empty if self._pinned is None else self._pinned.empty
        if self._meta:
            make = _on_meta
        made: dict[str, Tensor] = {}
        try:
            with torch.inference_mode(False):
                for name, (dtype, size) in self._columns.items():
                    made[name] = make((self._heads, rows, *size), dtype)
        except BaseException:
            self._release(made)
            raise
        return made

    def _release(self, columns: Mapping[str, Tensor]) -> None:
        if self._pinned is not None:
            self._pinned.release([*columns.values()])

    def _replace(self, layer: int, new: dict[str, Tensor]) -> None:
        old, self._layers[layer] = self._layers[layer], new
        self._release(old)

    def reserve(self, rows: int, have: int = 0) -> None:
        """See `Rows`. Grows layer by layer, so that at most one layer exists twice at a time."""
        if rows > self._capacity:
            capacity = self.room(rows, self._most)
            for i, old in enumerate(self._layers):
                new = self._blank(seen(capacity, self._windows[i]))
                for name, column in old.items():
                    new[name][:, :have] = column[:, :have]
                self._replace(i, new)
            self._capacity, self._used = capacity, have
        self._used = max(self._used, rows)

    @staticmethod
    def room(rows: int, most: int) -> int:
        """How many rows to allocate when `rows` are needed: a quarter more, so that the next turns
        fit, too."""
        return max(rows, min(most, -(-(rows + rows // 4) // _STEP) * _STEP))

    def first(self, layer: int) -> int:
        """See `Rows`."""
        return self._used - seen(self._used, self._windows[layer])

    def read(self, layer: int, count: int) -> Mapping[str, Tensor]:
        """See `Rows`. Returns views. count: at most the rows that were reserved."""
        count -= self.first(layer)
        assert count <= self._layers[layer]["k"].shape[1]
        return {name: column[:, :count] for name, column in self._layers[layer].items()}

    def write(self, layer: int, begin: int, columns: Mapping[str, Tensor]) -> None:
        """See `Rows`. Does not wait for a GPU."""
        begin -= self.first(layer)
        for name, rows in columns.items():
            place = self._layers[layer][name][:, begin : begin + rows.shape[1]]
            if place.data_ptr() != rows.data_ptr():
                copy_heads(place, rows, wait=False)

    def commit(self, rows: int, ids: Sequence[int] = ()) -> None:
        """See `Rows`."""

    def drop(self) -> None:
        """See `Rows`."""

    def clear(self) -> None:
        """See `Rows`."""
        for i in range(len(self._layers)):
            self._replace(i, self._blank(0))
        self._capacity = self._used = 0

    @property
    def nbytes(self) -> int:
        """See `Rows`. Pinned memory is held whole, other memory once it was touched."""
        if self._pinned is not None:
            return sum(column.nbytes for layer in self._layers for column in layer.values())
        each = sum(kind.itemsize * math.prod(size) for kind, size in self._columns.values())
        return self._heads * each * sum(seen(self._used, window) for window in self._windows)

    @property
    def working(self) -> int:
        """See `Rows`."""
        return 0


class LentRows:
    """`Rows` of which another tier has the first ones; that tier is read and never changes. The
    rows of a prompt are in memory while their layer is read, and are not kept: `commit` raises
    TierError."""

    kind = "ram"
    apart = False

    def __init__(self, lender: Rows) -> None:
        self._lender = lender
        self._have = self._rows = 0
        self._columns: dict[str, Tensor] = {}  # of one layer
        self._layer: int | None = None

    def reserve(self, rows: int, have: int = 0) -> None:
        """See `Rows`."""
        self.drop()
        self._rows, self._have = rows, have

    def first(self, layer: int) -> int:
        """See `Rows`."""
        return 0

    def read(self, layer: int, count: int) -> Mapping[str, Tensor]:
        """See `Rows`."""
        if count <= self._have:
            return self._lender.read(layer, count)
        if layer != self._layer:
            for name, column in self._lender.read(layer, self._have).items():
                if name not in self._columns:
                    with torch.inference_mode(False):
                        shape = (column.shape[0], self._rows, *column.shape[2:])
                        self._columns[name] = torch.empty(shape, dtype=column.dtype)
                self._columns[name][:, : self._have] = column
            self._layer = layer
        return {name: column[:, :count] for name, column in self._columns.items()}

    def write(self, layer: int, begin: int, columns: Mapping[str, Tensor]) -> None:
        """See `Rows`. Writes nothing."""

    def commit(self, rows: int, ids: Sequence[int] = ()) -> None:
        """See the class."""
        self.drop()
        raise TierError("another chat's tier keeps no rows of this one", self._have)

    def drop(self) -> None:
        """See `Rows`."""
        self._lender.drop()
        self._columns, self._layer = {}, None

    def clear(self) -> None:
        """See `Rows`."""
        self.drop()
        self._have = self._rows = 0

    @property
    def nbytes(self) -> int:
        """See `Rows`. The rows are counted where they belong."""
        return 0

    @property
    def working(self) -> int:
        """See `Rows`."""
        return self._lender.working + sum(column.nbytes for column in self._columns.values())


def seen(tokens: int, window: int | None) -> int:
    """How many of the rows of `tokens` tokens the next token sees; at least one."""
    return tokens if window is None else max(min(tokens, 1), min(tokens, window - 1))


def copy_heads(into: Tensor, rows: Tensor, *, wait: bool) -> None:
    """Copy rows [H, N, ...] between the host and a device, head by head: each head's rows are
    contiguous, so the copy needs no intermediate buffer. `wait`: return when the copy is done."""
    if into.device == rows.device:
        into.copy_(rows)
        return
    for place, head in zip(into, rows, strict=True):  # pragma: no cover - between host and CUDA
        place.copy_(head, non_blocking=not wait)


def copy_rows(source: Rows, into: Rows, layers: int, rows: int, ids: Sequence[int] = ()) -> None:
    """Copy the first `rows` rows of `source` to `into`, which must be empty. Raises TierError."""
    try:
        into.reserve(rows)
        for layer in range(layers):
            into.write(layer, 0, source.read(layer, rows))
        into.commit(rows, ids)
    finally:
        source.drop()
        into.drop()


def columns_of(
    shape: Shape, dtype: torch.dtype, coded: bool
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The columns of a tier: (dtype, size of one row) by name."""
    wide = (shape.head_dim,)
    kept: tuple[torch.dtype, tuple[int, ...]] = (torch.int8 if coded else dtype, wide)
    scale: tuple[torch.dtype, tuple[int, ...]] = (SCALE, ())
    return {"k": kept, "v": kept} | (dict.fromkeys(_SCALES, scale) if coded else {})


def row_nbytes(shape: Shape, dtype: torch.dtype, coded: bool = False) -> int:
    """Bytes that a tier needs for one token, over all layers and heads."""
    columns = columns_of(shape, dtype, coded).values()
    each = sum(kind.itemsize * math.prod(size) for kind, size in columns)
    return each * shape.layers * shape.kv_heads
