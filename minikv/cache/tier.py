"""The tier: the exact keys and values of everything that was read, beside the rows under a budget.

A later question attends to the whole tier, so that it is answered as by a cache without eviction,
and the rows that the answer is written with are chosen from all of it (`KVCache.recall`). Rows of
an answer are not exact, because a step attends to the rows under the budget; they never come here.
The next prompt reads the answer's tokens again instead.

The first `length` rows are final. A prompt writes behind them, and `commit` makes its rows final: a
prompt that fails leaves nothing to undo.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minikv.cache.staging import CudaCopies, Staging
from minikv.cache.stats import Shape
from minikv.cache.tier_rows import RamRows, Rows, TierError, columns_of


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
        rows: where; in memory by default, `columns_of` says of which columns."""
        self.shape, self.dtype, self.device, self.coded = shape, dtype, device, coded
        columns = columns_of(shape, dtype, coded)
        gpu = device.type == "cuda"
        self._rows = rows or RamRows(
            shape.layers, shape.kv_heads, columns, shape.max_context, pinned=gpu
        )
        self._direct = not gpu and not coded
        self._copies = CudaCopies(device) if gpu and self._rows.apart else None
        self._staging: Staging | None = None
        self._room = 0  # rows that `stage` has room for
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
        staged = 0 if self._staging is None else self._staging.nbytes
        return staged + (self._rows.working if self.device.type == "cpu" else 0)

    def open(self, rows: int) -> None:
        """A prompt begins after which there are so many rows. Raises what the host or the device
        raises when it has no memory, and TierError; then nothing has changed."""
        assert rows >= self.length
        self.failed = None
        self._rows.reserve(rows, self.length)
        self._open(rows)

    def reread(self, rows: int, beside: int) -> None:
        """The prompt is read, and is now read again: `stage` gives all of its rows, and room for up
        to `beside` rows behind them, which are not kept. Of a tier in a file. Raises TierError
        where the rows could not be kept."""
        self.commit(rows)
        if self.failed is not None:
            raise self.failed
        self._open(rows + beside)

    def _open(self, room: int) -> None:
        """Have a staging buffer of so many rows, unless it is that of where they are kept."""
        self._room = room
        if not self._direct:
            self._staging = Staging(
                self._rows,
                self.shape,
                self.dtype,
                self.device,
                room,
                self.length,
                coded=self.coded,
                copies=self._copies,
            )

    def stage(self, layer: int, rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values [H, rows, D] on the device, to be written from `length` on. Those below
        are there."""
        if self._direct:
            columns = self._rows.read(layer, self._room)
            key, value = columns["k"], columns["v"]
        else:
            assert self._staging is not None
            key, value = self._staging.layer(layer)
        return key[:, :rows], value[:, :rows]

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """A layer was read: keep what `stage` gave and the prompt has filled in."""
        if self._direct:
            new = {"k": key[:, self.length :], "v": value[:, self.length :]}
            self._rows.write(layer, self.length, new)
        else:
            assert self._staging is not None
            self._staging.store(layer, key, value)

    def _close(self) -> None:
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.close()

    def commit(self, rows: int) -> None:
        """The prompt is read: all of its rows are final. Waits for what is being written. Where
        that fails, `failed` says why: the prompt itself is not lost with it."""
        self._close()
        try:
            self._rows.commit(rows, self.ids)
        except TierError as error:
            self.failed = error
        else:
            self.length = rows

    def drop(self) -> None:
        """The prompt failed: its rows are no longer wanted. Cannot fail."""
        self._close()
        self._rows.drop()

    def truncate(self, rows: int) -> None:
        """Only the first rows are of the conversation as it is now. Cannot fail."""
        self.length = min(self.length, rows)

    def clear(self) -> None:
        """Forget the conversation and give its memory back."""
        self._close()
        self._rows.clear()
        self.length = 0
