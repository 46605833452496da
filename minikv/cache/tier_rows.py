"""Where a tier keeps its rows: in the host's memory, or behind the same methods in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from minikv.cache.stats import Shape
from minikv.errors import MinikvError

Columns = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""What is kept of each row: dtype and size, by name."""
_STEP = 1024  # rows by which memory grows
_SCALES = ("k_scale", "v_scale")
SCALE = torch.float16  # rounds a tenth as coarsely as the codes themselves


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

    kind: ram or file. apart: every layer has memory of its own, so that a copy of a layer may still
    be under way when the next one is read or written.
    """

    kind: str
    apart: bool

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
    apart = True

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
        """See `Rows`: views, of no more rows than were reserved."""
        assert count <= self._layers[layer]["k"].shape[1]
        return {name: column[:, :count] for name, column in self._layers[layer].items()}

    def write(self, layer: int, begin: int, columns: Mapping[str, Tensor]) -> None:
        """See `Rows`. Does not wait for a GPU."""
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
        self._layers = [self._blank(0) for _ in self._layers]

    @property
    def nbytes(self) -> int:
        """See `Rows`."""
        return sum(column.nbytes for layer in self._layers for column in layer.values())

    @property
    def working(self) -> int:
        """See `Rows`."""
        return 0


def copy_heads(into: Tensor, rows: Tensor, *, wait: bool) -> None:
    """Copy rows [H, N, ...] between the host and a device. One head after the other: each lies in
    one piece, which a GPU copies by itself, where the whole would go through a second copy."""
    if into.device == rows.device:
        into.copy_(rows)
        return
    for place, head in zip(into, rows, strict=True):  # pragma: no cover - between host and CUDA
        place.copy_(head, non_blocking=not wait)


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
    scale: tuple[torch.dtype, tuple[int, ...]] = (SCALE, ())
    return {"k": kept, "v": kept} | (dict.fromkeys(_SCALES, scale) if coded else {})


def row_nbytes(shape: Shape, dtype: torch.dtype, coded: bool = False) -> int:
    """Bytes that a tier takes for one token, over all layers and heads."""
    each = sum(
        kind.itemsize * (size[0] if size else 1)
        for kind, size in columns_of(shape, dtype, coded).values()
    )
    return each * shape.layers * shape.kv_heads
