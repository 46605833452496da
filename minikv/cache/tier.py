"""The tier: exact keys and values of all tokens that were read, kept beside the rows under the
budget.

A later question attends to the whole tier, so the question is read as by a cache without eviction.
The rows that the answer is written with are chosen from all rows of the tier (`KVCache.recall`). An
answer's own rows are not exact, because a decode step attends only to the rows under the budget. So
they are never stored here; the next prompt reads the answer's tokens again instead.

The first `length` rows are final. A prompt writes its rows after them, and `commit` makes these
final. So a prompt that fails leaves nothing to undo.
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

    If the device is the host and nothing is converted, the prompt is staged directly in the memory
    of `rows`, and nothing is written twice.

    length: how many rows are final. ids: the token ids of the conversation, which are stored with
    the rows. failed: why the rows of the last prompt could not be kept, or None.
    """

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device,
        *,
        coded: bool = False,
        rows: Rows | None = None,
        ahead: bool = True,
    ) -> None:
        """dtype: the network's. coded: keys and values are stored as int8 with a scale per row.
        rows: the storage, with the columns of `columns_of`; by default host memory. ahead: on a
        GPU, copy the next layer while this one is computed, into a second staging buffer."""
        self.shape, self.dtype, self.device, self.coded = shape, dtype, device, coded
        columns = columns_of(shape, dtype, coded)
        gpu = device.type == "cuda"
        self._rows = rows or RamRows(
            shape.layers, shape.kv_heads, columns, shape.max_context, device
        )
        self._direct = not gpu and not coded
        self._copies = CudaCopies(device) if gpu and ahead and self._rows.apart else None
        self._staging: Staging | None = None
        self._room = 0  # rows per layer that `stage` has room for
        self.length = 0
        self.ids: Sequence[int] = ()
        self.failed: TierError | None = None

    @property
    def rows(self) -> Rows:
        """The storage of the rows."""
        return self._rows

    @property
    def kind(self) -> str:
        """Where the rows are: "ram" or "file"."""
        return self._rows.kind

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, in memory or in a file."""
        return self._rows.nbytes

    @property
    def staging_nbytes(self) -> int:
        """Bytes on the device, in addition to `nbytes`, while a prompt is read."""
        staged = 0 if self._staging is None else self._staging.nbytes
        return staged + (self._rows.working if self.device.type == "cpu" else 0)

    def open(self, rows: int) -> None:
        """Begin a prompt after which the tier will have `rows` rows. Raises TierError, or what
        torch raises when memory runs out; then nothing has changed."""
        assert rows >= self.length
        self.failed = None
        self._rows.reserve(rows, self.length)
        self._open(rows)

    def reread(self, rows: int) -> None:
        """Commit the prompt's `rows` rows and open them again: `stage` then gives all of them.
        Raises TierError if the rows could not be kept."""
        self.commit(rows)
        if self.failed is not None:
            raise self.failed
        self._open(rows)

    def _open(self, room: int) -> None:
        """Allocate a staging buffer of `room` rows, unless all layers are staged directly in the
        storage."""
        self._room = room
        if not self._direct or any(map(self._rows.first, range(self.shape.layers))):
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
        """Keys and values [H, rows, D] on the device. The first `length` rows are filled; the
        caller writes the others."""
        if self._is_direct(layer):
            columns = self._rows.read(layer, self._room)
            key, value = columns["k"], columns["v"]
        else:
            assert self._staging is not None
            key, value = self._staging.layer(layer)
        return key[:, :rows], value[:, :rows]

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """The layer was read: keep the rows that were written to the buffers of `stage`."""
        if self._is_direct(layer):
            new = {"k": key[:, self.length :], "v": value[:, self.length :]}
            self._rows.write(layer, self.length, new)
        else:
            assert self._staging is not None
            self._staging.store(layer, key, value)

    def _is_direct(self, layer: int) -> bool:
        """Whether the layer is staged in the memory of its rows."""
        return self._direct and not self._rows.first(layer)

    def _close(self) -> None:
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.close()

    def commit(self, rows: int) -> None:
        """The prompt was read: make its rows final, `rows` in all. Waits for writes that are under
        way. If they fail, `failed` says why, and `length` stays; the prompt itself is not
        affected."""
        self._close()
        try:
            self._rows.commit(rows, self.ids)
        except TierError as error:
            self.failed = error
        else:
            self.length = rows

    def drop(self) -> None:
        """Discard the rows of the prompt under way. Cannot fail."""
        self._close()
        self._rows.drop()

    def truncate(self, rows: int) -> None:
        """Keep only the first `rows` rows: the conversation has become shorter. Cannot fail."""
        self.length = min(self.length, rows)

    def clear(self) -> None:
        """Forget the conversation and free its memory."""
        self.length = 0  # first: after an interrupt no row counts
        self._close()
        self._rows.clear()
