"""`FileRows`: the rows of a tier in a file. At most two layers of them are in memory.

`tier_format.py` describes the file's format.

A separate thread does all reading and writing, in order. So a layer's rows are read while the layer
before is computed, and are written while the next layers are computed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minikv.cache.tier_disk import FLAGS, Bytes, allocate, lock, opened, said, whole
from minikv.cache.tier_format import (
    PAGE,
    Committed,
    Header,
    Segment,
    behind,
    checksum,
    commit_page,
    committed,
    head_pages,
    part_at,
    part_size,
    read_header,
    rows_in,
    segment_size,
    top_page,
    width_of,
)
from minikv.cache.tier_rows import Columns, TierError


class _Buffer:
    """Memory for one layer: columns [H, N] or [H, N, D], and the same memory as bytes [H, N * n],
    with n bytes per row."""

    def __init__(self, heads: int, rows: int, columns: Columns, *, pinned: bool) -> None:
        with torch.inference_mode(False):
            self.columns = {
                name: torch.empty((heads, rows, *size), dtype=dtype, pin_memory=pinned and rows > 0)
                for name, (dtype, size) in columns.items()
            }
            self._bytes: list[tuple[Bytes, int]] = [
                (column.view(torch.uint8).reshape(heads, -1).numpy(), width_of(*columns[name]))
                for name, column in self.columns.items()
            ]
        self.rows = rows
        self.layer: int | None = None
        self.job: Future[None] | None = None  # the read or write that uses this memory

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self.columns.values())

    def pieces(self, begin: int, end: int) -> list[Bytes]:
        """The bytes of the rows `begin` to `end`, in the order of a part of the file."""
        return [
            head[begin * width : end * width] for column, width in self._bytes for head in column
        ]


class FileRows:
    """`Rows` in a file that is locked against other processes.

    path: of the file. kept: whether `close` leaves the file. damage: what was damaged when the file
    was opened, or "". ids: the token ids of the committed rows, -1 where unknown.
    """

    kind = "file"
    apart = False

    def __init__(self, handle: int, path: Path, header: Header, *, pinned: bool = False) -> None:
        """See `create` and `open`."""
        self._handle, self.path, self.header = handle, path, header
        self._closing = weakref.finalize(self, os.close, handle)  # also if nobody calls `close`
        self._closing.atexit = False
        self._pinned, self.damage, self.kept = pinned, "", True
        self._named = True
        self._segments: list[Segment] = []
        self._number = 0  # of the last commit record
        self._recorded = (0, 0)  # rows and segments that this record counts
        self._worker = ThreadPoolExecutor(1, "tier")
        self._last: Future[None] | None = None  # the last job
        self._failed: OSError | None = None  # error of a write
        self._begin = self._rows = 0  # the prompt's first new row, and the row after its last
        self._checks: dict[int, int] = {}
        self._buffers: list[_Buffer | None] = [None, None]

    # -- a file's life ----------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        path: Path,
        layers: int,
        heads: int,
        columns: Columns,
        identity: Mapping[str, object] | None = None,
        *,
        pinned: bool = False,
    ) -> FileRows:
        """Create a file that only the user can read. Raises TierError, also if the file exists;
        then no file was created."""
        header = Header(layers, heads, columns, identity or {})
        try:
            handle = os.open(path, FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise TierError(said(path, error)) from None
        try:
            lock(handle, path)
            whole(os.pwritev, handle, [top_page(header), bytes(2 * PAGE)], 0)
        except BaseException as error:
            os.close(handle)
            with contextlib.suppress(OSError):
                os.unlink(path)
            if isinstance(error, OSError):
                raise TierError(said(path, error)) from None
            raise
        return cls(handle, path, header, pinned=pinned)

    @classmethod
    def open(cls, path: Path, *, pinned: bool = False) -> FileRows:
        """Open a file with its committed rows. Damaged ones are left out, and `damage` says so.
        Raises TierError."""
        handle = opened(path, FLAGS)
        try:
            lock(handle, path)
            header = read_header(handle, path)
            found = committed(handle, header)
        except OSError as error:
            os.close(handle)
            raise TierError(said(path, error)) from None
        except BaseException:
            os.close(handle)
            raise
        made = cls(handle, path, header, pinned=pinned)
        made._take(found)
        return made

    def close(self) -> None:
        """Wait for writes under way, then close and unlock the file; delete it unless `kept`.
        Cannot fail."""
        if self._handle < 0:
            return
        self.drop()
        if not self.kept:
            self.unlink()
        self._worker.shutdown()
        handle, self._handle = self._handle, -1
        with contextlib.suppress(OSError):
            os.ftruncate(handle, self._end)
        with contextlib.suppress(OSError):
            self._closing()

    def unlink(self) -> None:
        """Remove the file's name. The file is deleted when it is closed, however the process
        ends."""
        named, self._named = self._named, False
        if named:
            with contextlib.suppress(OSError):
                os.unlink(self.path)

    def move(self, path: Path) -> bool:
        """Rename the file, and keep it when it is closed. Returns False if it has no name any more
        or `path` is on another file system. Raises OSError for other failures."""
        if not self._named:
            return False
        try:
            os.replace(self.path, path)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            return False
        self.path, self.kept = path, True
        return True

    def is_at(self, path: Path) -> bool:
        """Whether `path` is this file. If so, `self.path` becomes that name."""
        try:
            same = os.path.samestat(os.fstat(self._handle), os.lstat(path))
        except OSError:
            return False
        if same:
            self.path = path
        return same

    def _take(self, found: Committed) -> None:
        """Take over the committed content of the file."""
        self._segments, self._number = found.segments, found.number
        self._recorded, self.damage = found.recorded, found.damage

    # -- rows -------------------------------------------------------------------------------

    def reserve(self, rows: int, have: int = 0) -> None:
        """See `Rows`. Raises TierError if the disk has no room."""
        self.drop()
        self._check_writes()
        try:
            self._cut(have)
            if rows > have:
                allocate(self._handle, self._end, segment_size(self.header, rows - have))
        except OSError as error:
            raise TierError(said(self.path, error)) from None
        self._begin, self._rows = have, rows

    def first(self, layer: int) -> int:
        """See `Rows`."""
        return 0

    def read(self, layer: int, count: int) -> Mapping[str, Tensor]:
        """See `Rows`. Raises TierError if the file is damaged. After `reserve`, `commit` or `drop`,
        the first call must have the largest `count`."""
        buffer = self._taken(layer, count)
        following = layer + 1
        if self.rows and following < self.header.layers:
            ahead = self._buffer(following, count)
            if ahead.layer != following:
                ahead.layer = following
                ahead.job = self._submit(self._load, following, ahead)
        return {name: column[:, :count] for name, column in buffer.columns.items()}

    def write(self, layer: int, begin: int, columns: Mapping[str, Tensor]) -> None:
        """See `Rows`. `commit` raises the errors of writes."""
        assert begin == self._begin
        end = begin + columns["k"].shape[1]
        assert end == self._rows
        if begin == end:
            return
        buffer = self._taken(layer)
        for name, rows in columns.items():
            place = buffer.columns[name][:, begin:end]
            if place.data_ptr() != rows.data_ptr():
                place.copy_(rows)
        buffer.job = self._submit(self._store, layer, buffer)

    def commit(self, rows: int, ids: Sequence[int] = ()) -> None:
        """See `Rows`. Returns when the rows are written to the file; they and the commit record
        reach the disk in the background. Raises TierError if a write has failed. If one fails
        later, the next `reserve`, `commit` or `sync` raises it."""
        begin = self._begin
        assert rows == self._rows
        self.drop()
        if rows == begin:
            self._check_writes()
            return
        checks = tuple(self._checks.get(i, 0) for i in range(self.header.layers))
        if self._failed is None:
            assert len(self._checks) == len(checks)
        self._check_writes()
        known = tuple(ids[begin:rows]) if len(ids) >= rows else (-1,) * (rows - begin)
        head = head_pages(begin, checks, known)
        chain = self._segments[-1].chain if self._segments else 0
        made = Segment(
            self._end, begin, rows - begin, rows - begin, checks, known, zlib.crc32(head, chain)
        )
        self._segments.append(made)
        self._begin = rows
        self._number += 1
        self._recorded = self.rows, len(self._segments)
        self._submit(
            self._seal,
            made.at,
            head,
            commit_page(self._number, self._segments),
            PAGE * (1 + self._number % 2),
        )

    def drop(self) -> None:
        """See `Rows`."""
        self._wait()
        self._buffers = [None, None]

    def clear(self) -> None:
        """See `Rows`."""
        self.drop()
        with contextlib.suppress(OSError):
            self._cut(0)
            os.ftruncate(self._handle, self._end)
        self._begin = self._rows = 0

    def sync(self) -> None:
        """Wait until everything committed is on disk. Raises TierError."""
        self._wait()
        self._check_writes()

    @property
    def rows(self) -> int:
        """How many rows are committed."""
        return rows_in(self._segments)

    @property
    def ids(self) -> list[int]:
        """See the class."""
        return [id for segment in self._segments for id in segment.ids[: segment.used]]

    @property
    def nbytes(self) -> int:
        """See `Rows`: bytes of the file up to the end of its last segment."""
        return self._end

    @property
    def working(self) -> int:
        """See `Rows`: the memory of at most two layers."""
        return sum(buffer.nbytes for buffer in self._buffers if buffer is not None)

    # -- layers in memory ---------------------------------------------------------------------

    def _buffer(self, layer: int, count: int) -> _Buffer:
        """The memory that the layer uses; layers of the same parity share it. It has room for
        `count` rows and for all stored rows."""
        buffer = self._buffers[layer % 2]
        if buffer is None:
            # The unused last rows of a segment are read with the others.
            stored = max((s.begin + s.rows for s in self._segments), default=0)
            header, rows = self.header, max(count, self._rows, stored)
            buffer = _Buffer(header.heads, rows, header.columns, pinned=self._pinned)
            self._buffers[layer % 2] = buffer
        assert count <= buffer.rows
        return buffer

    def _taken(self, layer: int, count: int = 0) -> _Buffer:
        """The memory with the layer's rows, after its read or write has finished."""
        buffer = self._buffer(layer, count)
        if buffer.layer != layer:
            if buffer.job is not None:
                with contextlib.suppress(TierError):  # of a layer that was read ahead, not used
                    buffer.job.result()
            buffer.layer, buffer.job = layer, None
            if self.rows:
                buffer.job = self._submit(self._load, layer, buffer)
        if buffer.job is not None:
            job, buffer.job = buffer.job, None
            try:
                job.result()
            except BaseException:
                buffer.layer = None
                raise
        return buffer

    # -- in the thread --------------------------------------------------------------------------

    def _submit(self, job: Callable[..., None], *arguments: Any) -> Future[None]:
        self._last = self._worker.submit(job, *arguments)
        return self._last

    def _wait(self) -> None:
        """Wait until the thread has no job."""
        if self._last is not None:
            with contextlib.suppress(Exception):  # raised where the result is used
                self._last.result()
            self._last = None

    def _load(self, layer: int, buffer: _Buffer) -> None:
        for segment in self._segments:  # in this order: used rows overwrite unused ones
            part = part_size(self.header, segment.rows)
            pieces = buffer.pieces(segment.begin, segment.begin + segment.rows)
            pieces.append(np.empty(part - sum(map(len, pieces)), np.uint8))
            at = part_at(self.header, segment.at, segment.rows, layer)
            try:
                whole(os.preadv, self._handle, pieces, at)
            except OSError as error:
                raise TierError(said(self.path, error), segment.begin) from None
            if checksum(pieces) != segment.checks[layer]:
                raise TierError(
                    f"{self.path.name} is damaged from token {segment.begin:,} on", segment.begin
                )

    def _store(self, layer: int, buffer: _Buffer) -> None:
        count = self._rows - self._begin
        pieces = buffer.pieces(self._begin, self._rows)
        part = part_size(self.header, count)
        pieces.append(np.zeros(part - sum(map(len, pieces)), np.uint8))
        self._checks[layer] = checksum(pieces)
        at = part_at(self.header, self._end, count, layer)
        self._try(lambda: whole(os.pwritev, self._handle, pieces, at))

    def _seal(self, at: int, head: bytes, record: bytes, place: int) -> None:
        """Write the head, then the commit record: each is on disk before the next is written."""

        def write() -> None:
            whole(os.pwritev, self._handle, [head], at)
            self._to_disk()
            whole(os.pwritev, self._handle, [record], place)
            self._to_disk()

        self._try(write)

    def _try(self, write: Callable[[], None]) -> None:
        """Run `write`, unless an earlier write failed."""
        if self._failed is None:
            try:
                write()
            except OSError as error:
                self._failed = error

    # -- the file -----------------------------------------------------------------------------

    @property
    def _end(self) -> int:
        """The offset after the last segment, in bytes."""
        return behind(self.header, self._segments[-1] if self._segments else None)

    def _to_disk(self) -> None:
        """Flush the file to disk. Not needed for a file without a name, which does not outlive the
        process; there checksums find failed writes."""
        if self._named:
            getattr(os, "fdatasync", os.fsync)(self._handle)

    def _check_writes(self) -> None:
        if self._failed is not None:
            raise TierError(said(self.path, self._failed))

    def _cut(self, rows: int) -> None:
        """Keep only the first `rows` rows, and record that in the file. Raises OSError."""
        assert rows <= self.rows
        kept = [segment for segment in self._segments if segment.begin < rows]
        if kept:
            kept[-1] = replace(kept[-1], used=rows - kept[-1].begin)
        self._segments = kept
        if self._recorded != (rows, len(kept)):
            self._number += 1
            at = PAGE * (1 + self._number % 2)
            whole(os.pwritev, self._handle, [commit_page(self._number, self._segments)], at)
            self._to_disk()
            self._recorded = rows, len(kept)


def header_of(path: Path) -> Header:
    """Read a file's header, also if another process has it open. Raises TierError."""
    handle = opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return read_header(handle, path)
    except OSError as error:
        raise TierError(said(path, error)) from None
    finally:
        os.close(handle)


def is_open(path: Path) -> bool:
    """Whether a process has this file open as a tier. Raises OSError if that cannot be
    determined."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
