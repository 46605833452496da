"""The tier: a store of the exact keys and values of all tokens that were read, separate from the
rows under the budget.

A later question attends to the whole tier, so it is read as in a cache without eviction.
The rows for writing the answer are chosen from all rows of the tier (`KVCache.recall`). An answer's
own rows are not exact, because a decode step attends only to the rows under the budget. So they are
never stored here; the next prompt reads the answer's tokens again instead.

The first `length` rows are final. A prompt writes its rows after them, and `commit` makes these
final. So a prompt that fails leaves nothing to undo.

One layer's keys and values are on the device at a time. On CUDA there are two buffers and a stream
for copies: while the network computes with one layer, the next layer's rows are copied from the
host, and the last layer's new rows are copied to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minikv import kernels
from minikv.cache.stats import Shape
from minikv.cache.tier_file import FileRows
from minikv.cache.tier_rows import (
    SCALE,
    RamRows,
    Slots,
    TierError,
    columns_of,
    copy_heads,
    row_nbytes,
)
from minikv.kernels.dispatch import Kernels

Rows = RamRows | FileRows


class Copies:
    """Copies between host and device: on `device`, a GPU, in a separate stream, parallel to
    computing; without a device they are synchronous.

    slots: layers that are on the device.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device is not None:  # pragma: no cover - CUDA only
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.slots = 1 if device is None else 2

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Launch copies within this context, after everything launched before."""
        if self._stream is not None:  # pragma: no cover - CUDA only
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                yield
        else:
            yield

    def mark(self) -> Any:
        """A point after everything launched so far within `run`."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, mark: Any) -> None:
        """Later computations wait for that point."""
        if self._stream is not None:  # pragma: no cover - CUDA only
            torch.cuda.current_stream(self._stream.device).wait_event(mark)

    def finish(self) -> None:
        """Block the host until everything launched within `run` is done."""
        if self._stream is not None:  # pragma: no cover - CUDA only
            self._stream.synchronize()


class Tier:
    """Rows of all layers and KV heads in the order of their positions, and a staging buffer of one
    layer on the device.

    If the device is the host and nothing is converted, a prompt is staged directly in the memory of
    `rows`, so nothing is written twice.

    rows: the storage. length: how many rows are final. ids: the token ids of the conversation,
    which are stored with the rows. failed: why the rows of the last prompt could not be stored, or
    None.
    """

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device,
        *,
        coded: bool = False,
        rows: Rows | None = None,
        lent: bool = False,
        ahead: bool = True,
    ) -> None:
        """dtype: the network's. coded: keys and values are stored as int8 with a scale per row.
        rows: with the columns of `columns_of`; by default host memory. lent: the rows belong to
        another chat and never change; a prompt's own rows are only staged, and cannot be stored.
        ahead: on a GPU, copy the next layer into a second staging buffer while this one is
        computed."""
        self.shape, self.dtype, self.device, self.coded = shape, dtype, device, coded
        columns = columns_of(shape, dtype, coded)
        gpu = device.type == "cuda"
        self.rows = rows or RamRows(
            shape.layers, shape.kv_heads, columns, shape.max_context, device
        )
        self._lent = lent
        self._direct = not gpu and not coded and not lent
        self._copies = Copies(device if gpu and ahead and self.rows.apart else None)
        self._staging: Slots | None = None
        self._room = 0  # rows per layer that fit into the staging buffers
        self.length = 0
        self.ids: Sequence[int] = ()
        self.failed: TierError | None = None

    def staging(self, rows: int) -> tuple[int, int]:
        """Bytes on the device, without those of the stored rows, while a prompt is read after which
        there are `rows` rows: throughout, and in addition for a moment when a layer is
        converted."""
        shape, codes = self.shape, row_nbytes(self.shape, self.dtype, self.coded)
        layer = row_nbytes(shape, self.dtype) // shape.layers
        buffers = 0 if self._direct else self._copies.slots * layer * rows
        if isinstance(self.rows, FileRows) and self.device.type == "cpu":
            buffers += self.rows.slots * codes // shape.layers * rows
        if not self.coded:
            return buffers, 0
        heads, size = shape.kv_heads, shape.head_dim
        read = self.length * heads * (size * (1 + self.dtype.itemsize) + 8)
        return buffers, max(read, (rows - self.length) * heads * (6 * size + 8))

    def open(self, rows: int) -> None:
        """Begin a prompt after which the tier will have `rows` rows. Raises TierError, or torch's
        error if memory runs out; then nothing has changed."""
        assert rows >= self.length
        self.failed = None
        if not self._lent:
            self.rows.reserve(rows, self.length)
        self._open(rows)

    def reread(self, rows: int) -> None:
        """Commit the prompt's `rows` rows and open them again: `stage` then provides all of them.
        Raises TierError if the rows could not be stored."""
        self.commit(rows)
        if self.failed is not None:
            raise self.failed
        self._open(rows)

    def _open(self, room: int) -> None:
        """Allocate staging buffers of `room` rows, unless layers are staged directly in the
        storage."""
        self._room = room
        if not self._direct:
            wide = (self.shape.kv_heads, room, self.shape.head_dim)
            buffers = [
                {name: torch.empty(wide, dtype=self.dtype, device=self.device) for name in "kv"}
                for _ in range(self._copies.slots)
            ]
            self._staging = Slots(buffers, self.shape.layers, self._fetch, self._copies.wait)

    def _fetch(self, layer: int, into: Mapping[str, Tensor]) -> Any:
        """Copy the layer's final rows to the device, and decode int8. Always returns a mark: even
        without final rows, new rows of another layer may still be being copied from this buffer."""
        with self._copies.run():
            if self.length:
                columns = self.rows.read(layer, self.length)
                for name, buffer in into.items():
                    place = buffer[:, : self.length]
                    self._copy(place, columns[name], columns.get(f"{name}_scale"))
        return self._copies.mark()

    def _copy(self, into: Tensor, rows: Tensor, scales: Tensor | None) -> None:
        """Copy rows [H, n, D] to the device, and decode them if they have scales [H, n]."""
        wait = self._copies.slots == 1
        if scales is None:
            copy_heads(into, rows, wait=wait)
            return
        codes, scale = (torch.empty_like(t, device=into.device) for t in (rows, scales))
        copy_heads(codes, rows, wait=wait)
        copy_heads(scale, scales, wait=wait)
        into.copy_(kernels.from_codes(codes, scale.float(), self.dtype))

    def stage(self, layer: int, rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values [H, rows, D] on the device. For work launched from now on, they contain
        the first `length` rows; the caller writes the others."""
        if self._direct:
            columns = self.rows.read(layer, self._room)
        else:
            assert self._staging is not None
            columns = self._staging.layer(layer)
        return columns["k"][:, :rows], columns["v"][:, :rows]

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """The layer was read: store the rows that were written to the buffers of `stage`."""
        if self._lent:
            return
        begin = self.length
        new = {"k": key[:, begin:], "v": value[:, begin:]}
        with self._copies.run():
            if self.coded:
                for name in ("k", "v"):
                    new[name], scale = kernels.to_codes(new[name])
                    new[f"{name}_scale"] = scale.to(SCALE)
            self.rows.write(layer, begin, new)

    def _close(self) -> None:
        """Wait for the copies, and only then free the buffers. If a copy failed, the next
        computation raises."""
        staging, self._staging = self._staging, None
        with contextlib.suppress(RuntimeError):
            self._copies.finish()
        del staging

    def commit(self, rows: int) -> None:
        """The prompt was read: make its rows final, `rows` in all. Waits for pending writes. If
        they fail, `failed` says why, and `length` stays; the prompt itself is not affected."""
        self._close()
        try:
            if self._lent:
                raise TierError("another chat's tier cannot store this one's rows", self.length)
            self.rows.commit(rows, self.ids)
        except TierError as error:
            self.failed = error
        else:
            self.length = rows

    def drop(self) -> None:
        """Discard the rows of the prompt under way. Cannot fail."""
        self._close()
        self.rows.drop()

    def truncate(self, rows: int) -> None:
        """Keep only the first `rows` rows: the conversation has become shorter. Cannot fail."""
        self.length = min(self.length, rows)


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


class TierSteps:
    """`Attend` for one token at a time, over the first `rows` rows of a tier and the tokens fed
    here: what a cache without eviction would compute. Does not change the tier. Call `close` after
    the last one."""

    def __init__(self, tier: Tier, rows: int, ops: Kernels) -> None:
        assert 0 <= rows <= tier.length
        self._tier, self._rows, self._ops = tier, rows, ops
        self.position = rows
        self._own: list[Tensor | None] = [None] * tier.shape.layers  # keys and values

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend`; one token."""
        assert len(q) == 1
        tier, shape, own = self._tier, self._tier.shape, torch.stack((k[0], v[0]))[:, :, None]
        if layer == 0:
            tier.open(tier.length)
        if (before := self._own[layer]) is not None:
            own = torch.cat((before, own), 2)
        self._own[layer] = own
        query = q[0].view(shape.kv_heads, -1, 1, shape.head_dim)
        window = shape.windows[layer]
        oldest = 0 if window is None else max(0, self.position + 1 - window)
        parts = []
        if oldest < self._rows:
            key, value = tier.stage(layer, tier.length)
            seen = slice(oldest, self._rows)
            parts.append(self._ops.rows_attention(query, key[:, seen], value[:, seen]))
        own = own[:, :, max(0, oldest - self._rows) :]
        parts.append(self._ops.rows_attention(query, own[0], own[1]))
        return self._ops.merge(parts)[0].reshape(1, shape.heads, shape.head_dim)

    def advance(self, tokens: int) -> None:
        """See `Attend`."""
        assert tokens == 1
        self.position += 1
        self.close()

    def close(self) -> None:
        """Free the working memory of the tier. Cannot fail."""
        self._tier.drop()
