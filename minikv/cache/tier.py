"""The tier: the exact keys and values of everything that was read, beside the rows under a budget.

A later question attends to the whole tier, so that it is answered as by a cache without eviction,
and the rows that the answer is written with are chosen from all of it (`KVCache.recall`). Rows of
an answer are not exact, because a step attends to the rows under the budget; they never come here.
The next prompt reads the answer's tokens again instead.

The first `length` rows are final. A prompt writes behind them, and `commit` makes its rows final: a
prompt that fails leaves nothing to undo.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from minikv import kernels
from minikv.cache.stats import Shape
from minikv.errors import MinikvError

Columns = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""What is kept of each row: dtype and size, by name."""
_STEP = 1024  # rows by which memory grows
_SCALES = ("k_scale", "v_scale")
_SCALE = torch.float16  # rounds a tenth as coarsely as the codes themselves


class TierError(MinikvError):
    """A tier cannot be read or written. `rows`: how many of its first rows are as they were
    written; None if it cannot be used any more."""

    def __init__(self, message: str, rows: int | None = None) -> None:
        super().__init__(message)
        self.rows = rows


class Rows(Protocol):
    """Where the tier's columns are kept: [H, N] or [H, N, D] for each layer, on the host.

    A prompt calls `reserve`; for one layer after the other `read`, and `write` for its new rows;
    then `commit`, or `drop` if it failed.
    """

    kind: str

    def reserve(self, rows: int, have: int = 0) -> None:
        """A prompt begins after which there are so many rows; `have` of them are there, and what is
        behind them is no longer wanted. Those stay, also after an error."""
        ...

    def read(self, layer: int, count: int) -> Mapping[str, Tensor]:
        """Room for the first `count` rows of a layer, with those in it that are there. Valid until
        the next call for another layer."""
        ...

    def write(self, layer: int, begin: int, columns: Mapping[str, Tensor]) -> None:
        """Keep the layer's rows from `begin` on, which is what `reserve` was told; they may be in
        the room that `read` gave."""
        ...

    def commit(self, rows: int, ids: Sequence[int] = ()) -> None:
        """So many rows are final. Called before they count. ids: their tokens, where known. Raises
        TierError if they could not be written."""
        ...

    def drop(self) -> None:
        """The prompt is over. Cannot fail."""
        ...

    def clear(self) -> None:
        """Forget everything and give the memory back."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that are taken."""
        ...

    @property
    def working(self) -> int:
        """Bytes of memory beside them, while a prompt is read."""
        ...


class RamRows:
    """In the host's memory, pinned where a GPU copies from it."""

    kind = "ram"

    def __init__(
        self,
        layers: int,
        heads: int,
        columns: Columns,
        most: int,
        *,
        pinned: bool = False,
    ) -> None:
        """columns: dtype and size of one row of each; most: rows that there can ever be."""
        self._heads, self._columns, self._most, self._pinned = heads, columns, most, pinned
        self._layers = [self._blank(0) for _ in range(layers)]

    def _blank(self, rows: int) -> dict[str, Tensor]:
        with torch.inference_mode(False):
            return {
                name: torch.empty(
                    (self._heads, rows, *size), dtype=dtype, pin_memory=self._pinned and rows > 0
                )
                for name, (dtype, size) in self._columns.items()
            }

    def reserve(self, rows: int, have: int = 0) -> None:
        """See `Rows`. Layer by layer, so that one layer at the most exists twice."""
        if rows <= self._room:
            return
        for i, old in enumerate(self._layers):
            new = self._blank(self.room(rows, self._most))
            for name, column in old.items():
                new[name][:, : column.shape[1]] = column
            self._layers[i] = new

    @staticmethod
    def room(rows: int, most: int) -> int:
        """Rows that memory is taken for when so many are needed: a quarter more, so that the next
        turns fit, too."""
        return max(rows, min(most, -(-(rows + rows // 4) // _STEP) * _STEP))

    @property
    def _room(self) -> int:
        return min(layer["k"].shape[1] for layer in self._layers)

    def read(self, layer: int, count: int) -> Mapping[str, Tensor]:
        """See `Rows`: views."""
        return {name: column[:, :count] for name, column in self._layers[layer].items()}

    def write(self, layer: int, begin: int, columns: Mapping[str, Tensor]) -> None:
        """See `Rows`."""
        for name, rows in columns.items():
            place = self._layers[layer][name][:, begin : begin + rows.shape[1]]
            if place.data_ptr() != rows.data_ptr():
                place.copy_(rows)

    def commit(self, rows: int, ids: Sequence[int] = ()) -> None:
        """See `Rows`."""

    def drop(self) -> None:
        """See `Rows`."""

    def clear(self) -> None:
        """See `Rows`."""
        self._layers = [self._blank(0) for _ in self._layers]

    @property
    def nbytes(self) -> int:
        """See `Rows`."""
        return sum(column.nbytes for layer in self._layers for column in layer.values())

    @property
    def working(self) -> int:
        """See `Rows`."""
        return 0


class Tier:
    """Rows of all layers and KV heads in the order of their positions, and a staging buffer of one
    layer on the device.

    Where the host's memory is the device's and nothing is converted, the staging buffer is the
    memory that the rows are kept in or go through: then nothing is written twice.

    `ids`: the tokens of the conversation, to be kept beside the rows. `failed`: why the rows of the
    last prompt could not be kept.
    """

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device,
        *,
        coded: bool = False,
        rows: Rows | None = None,
    ) -> None:
        """dtype: the network's. coded: keys and values are kept as int8 with a scale per row.
        rows: where; in memory by default, `columns` says of which columns."""
        self.shape, self.dtype, self.device, self.coded = shape, dtype, device, coded
        columns = columns_of(shape, dtype, coded)
        gpu = device.type == "cuda"
        self._rows = rows or RamRows(
            shape.layers, shape.kv_heads, columns, shape.max_context, pinned=gpu
        )
        self._direct = not gpu and not coded
        self._staging: tuple[Tensor, Tensor] | None = None
        self.length = 0
        self.ids: Sequence[int] = ()
        self.failed: TierError | None = None

    @property
    def rows(self) -> Rows:
        """Where they are kept."""
        return self._rows

    @property
    def kind(self) -> str:
        """Where the rows are: ram or file."""
        return self._rows.kind

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, wherever they are."""
        return self._rows.nbytes

    @property
    def staging_nbytes(self) -> int:
        """Bytes beside them, on the device, while a prompt is read."""
        staged = 0 if self._staging is None else sum(t.nbytes for t in self._staging)
        return staged + (self._rows.working if self.device.type == "cpu" else 0)

    def open(self, rows: int) -> None:
        """A prompt begins after which there are so many rows. Raises what the host or the device
        raises when it has no memory, and TierError; then nothing has changed."""
        assert rows >= self.length
        self.failed = None
        self._rows.reserve(rows, self.length)
        if not self._direct:
            wide = (self.shape.kv_heads, rows, self.shape.head_dim)
            self._staging = (
                torch.empty(wide, dtype=self.dtype, device=self.device),
                torch.empty(wide, dtype=self.dtype, device=self.device),
            )

    def stage(self, layer: int, rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values [H, rows, D] on the device, to be written from `length` on. Those below
        are there."""
        if self._direct:
            columns = self._rows.read(layer, rows)
            return columns["k"], columns["v"]
        assert self._staging is not None
        if self.length:
            columns = self._rows.read(layer, self.length)
            ahead = not self._rows.working  # else the next layer may take the same memory
            for name, into in zip(("k", "v"), self._staging, strict=True):
                stored = columns[name].to(self.device, non_blocking=ahead)
                if self.coded:
                    scale = columns[f"{name}_scale"].to(self.device, non_blocking=ahead)
                    stored = kernels.from_codes(stored, scale.float(), self.dtype)
                into[:, : self.length] = stored
        return self._staging

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """A layer was read: keep what `stage` gave and the prompt has filled in."""
        new = {"k": key[:, self.length :], "v": value[:, self.length :]}
        if self.coded:
            for name in ("k", "v"):
                new[name], scale = kernels.to_codes(new[name])
                new[f"{name}_scale"] = scale.to(_SCALE)
        self._rows.write(layer, self.length, new)

    def commit(self, rows: int) -> None:
        """The prompt is read: all of its rows are final. Waits for what is being written. Where
        that fails, `failed` says why: the prompt itself is not lost with it."""
        self._staging = None
        try:
            self._rows.commit(rows, self.ids)
        except TierError as error:
            self.failed = error
        else:
            self.length = rows

    def drop(self) -> None:
        """The prompt failed: its rows are no longer wanted. Cannot fail."""
        self._staging = None
        self._rows.drop()

    def truncate(self, rows: int) -> None:
        """Only the first rows are of the conversation as it is now. Cannot fail."""
        self.length = min(self.length, rows)

    def clear(self) -> None:
        """Forget the conversation and give its memory back."""
        self._rows.clear()
        self.length, self._staging = 0, None


def copy_rows(source: Rows, into: Rows, layers: int, rows: int, ids: Sequence[int] = ()) -> None:
    """Have the first rows of `source` in `into`, which has none. Raises TierError."""
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
    """What a tier keeps of each row: (dtype, size) by name."""
    wide = (shape.head_dim,)
    kept: tuple[torch.dtype, tuple[int, ...]] = (torch.int8 if coded else dtype, wide)
    scale: tuple[torch.dtype, tuple[int, ...]] = (_SCALE, ())
    return {"k": kept, "v": kept} | (dict.fromkeys(_SCALES, scale) if coded else {})


def row_nbytes(shape: Shape, dtype: torch.dtype, coded: bool = False) -> int:
    """Bytes that a tier takes for one token, over all layers and heads."""
    each = sum(
        kind.itemsize * (size[0] if size else 1)
        for kind, size in columns_of(shape, dtype, coded).values()
    )
    return each * shape.layers * shape.kv_heads
