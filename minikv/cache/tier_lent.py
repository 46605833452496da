"""`LentRows`: the rows of one chat's tier, read by another chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from minikv.cache.tier_rows import Rows, TierError


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
