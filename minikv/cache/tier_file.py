"""`FileRows`: the rows of a tier on disk. At most two layers of them are in memory.

A tier is a directory with two files. `rows` has a segment for each prompt, one after the other: the
token ids, int32, then a part for each layer, which is [column][KV head][row], so that one `preadv`
reads a layer's rows of a segment into their places in [KV head][row] columns. `manifest` says what
counts: a first line with the format and a CRC of all that follows, and JSON with layers, heads,
columns, the identity of the model, the number of rows, and of each segment its first position, its
rows and the CRCs of its ids and parts. What is behind the last segment is ignored.

A prompt writes its segment, which is on disk before a new manifest replaces the old one. When a
conversation becomes shorter, a manifest with fewer rows is on disk before anything is overwritten;
then only the first rows of the last segment are used. So after a crash the last manifest is whole,
and so is all that it names.

The directory is locked against other processes. A tier without a name is only the file `rows`,
which is deleted with the process. A separate thread does all reading and writing, in order. So a
layer's rows are read while the layer before is computed, and are written while the next layers are
computed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import secrets
import shutil
import stat
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minikv.cache.tier_rows import Columns, TierError, pinned_memory
from minikv.pages import Empty, empty

MAGIC = b"minikv tier 2 %08x\n"
_LINE = len(MAGIC % 0)
_ROWS, _MANIFEST, _NEXT = "rows", "manifest", "manifest.next"
_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = _SAFE | os.O_RDONLY | os.O_DIRECTORY
_MOST = 512  # buffers in one preadv or pwritev; systems allow 1,024
_LARGEST = 1 << 20  # limit for layers, heads and numbers per row that a manifest may claim
_MOST_ROWS = 1 << 31
_MOST_BYTES = 64 << 20  # of a manifest: that of 5,000 prompts and 100 layers has 6 MB

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_KINDS = {
    str(kind).removeprefix("torch."): kind
    for kind in (torch.float32, torch.bfloat16, torch.float16, torch.int8)
}


@dataclass(frozen=True, slots=True)
class Header:
    """What a tier is of. columns: dtype and size of one row of each, by name. identity: what the
    rows belong to; other modules write and compare it."""

    layers: int
    heads: int
    columns: Columns
    identity: Mapping[str, object]

    def part(self, rows: int) -> int:
        """Bytes of a layer's part of a segment."""
        return self.heads * rows * sum(_width(*kind) for kind in self.columns.values())

    def segment(self, rows: int) -> int:
        """Bytes of a segment."""
        return 4 * rows + self.layers * self.part(rows)


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows of one prompt. at: its offset in bytes. begin: position of its first row. rows: how
    many it has. used: how many of the first ones the conversation still has. checks: CRCs of the
    ids and of each layer's part. ids: token ids of the rows, -1 where unknown."""

    at: int
    begin: int
    rows: int
    used: int
    checks: tuple[int, ...]
    ids: tuple[int, ...] = ()


# -- the manifest -----------------------------------------------------------------------------


def written(header: Header, segments: Sequence[Segment]) -> bytes:
    """The bytes of a manifest."""
    columns = {
        name: (str(dtype).removeprefix("torch."), size)
        for name, (dtype, size) in header.columns.items()
    }
    return sealed(
        json.dumps(
            {
                "layers": header.layers,
                "heads": header.heads,
                "columns": columns,
                "identity": header.identity,
                "rows": _count(segments),
                "segments": [(one.begin, one.rows, one.checks) for one in segments],
            }
        ).encode()
    )


def sealed(text: bytes) -> bytes:
    """`text` behind the first line of a manifest."""
    return MAGIC % zlib.crc32(text) + text


def parsed(data: bytes, name: str) -> tuple[Header, list[Segment]]:
    """What a manifest says; the segments without their ids. Raises TierError if it is damaged or
    impossible. name: of the tier, for the message."""
    text = data[_LINE:]
    if data[:_LINE] != MAGIC % zlib.crc32(text):
        raise TierError(f"{name} is damaged, or of another version of minikv")
    try:
        made = json.loads(text)
        columns = {
            column: (_KINDS[kind], tuple(size)) for column, (kind, size) in made["columns"].items()
        }
        sizes = [made["layers"], made["heads"], *(n for _, size in columns.values() for n in size)]
        if not columns or not all(type(n) is int and 0 < n < _LARGEST for n in sizes):
            raise ValueError(sizes)
        header = Header(made["layers"], made["heads"], columns, made["identity"])
        return header, _segments(header, made["segments"], made["rows"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise TierError(f"{name} does not say what it is") from None


def _segments(header: Header, stated: Sequence[Any], total: int) -> list[Segment]:
    """Raises ValueError or TypeError if there cannot be such segments."""
    found: list[Segment] = []
    at = 0
    ends = [*(begin for begin, _, _ in stated[1:]), total] if stated else []
    for (begin, rows, checks), end in zip(stated, ends, strict=True):
        numbers = [begin, rows, end, *checks]
        if not all(type(n) is int and 0 <= n < 1 << 32 for n in numbers) or rows >= _MOST_ROWS:
            raise ValueError(numbers)
        if not begin < end <= begin + rows or len(checks) != 1 + header.layers:
            raise ValueError(numbers)
        found.append(Segment(at, begin, rows, end - begin, tuple(checks)))
        at += header.segment(rows)
    if type(total) is not int or total != _count(found) or (found and found[0].begin):
        raise ValueError(total)
    return found


def _count(segments: Sequence[Segment]) -> int:
    """How many rows of these segments the conversation still has."""
    return segments[-1].begin + segments[-1].used if segments else 0


def _with_ids(handle: int, header: Header, segments: Sequence[Segment]) -> list[Segment]:
    """The first segments, with their ids, up to one that is damaged. Raises OSError."""
    size, found = os.fstat(handle).st_size, list[Segment]()
    for one in segments:
        if one.at + header.segment(one.rows) > size:
            break
        data = bytearray(4 * one.rows)
        _whole(os.preadv, handle, [data], one.at)
        if zlib.crc32(data) != one.checks[0]:
            break
        found.append(replace(one, ids=tuple(np.frombuffer(data, "<i4").tolist())))
    return found


def _read_manifest(folder: int, path: Path) -> tuple[Header, list[Segment]]:
    """Raises TierError and OSError."""
    handle = _opened(_MANIFEST, os.O_RDONLY, folder)
    with os.fdopen(handle, "rb") as file:
        return parsed(file.read(_MOST_BYTES), path.name)


def header_of(path: Path) -> Header:
    """Read what a tier is of, also if another process has it open. Raises TierError."""
    with _as_tier_error(path):
        folder = os.open(path, _FOLDER)
        try:
            return _read_manifest(folder, path)[0]
        finally:
            os.close(folder)


def is_open(path: Path) -> bool:
    """Whether a process has this open as a tier. Raises OSError if that cannot be determined."""
    handle = os.open(path, os.O_RDONLY | _SAFE)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def remove(path: Path) -> None:
    """Delete a tier, or the file that a tier of an earlier version was. Cannot fail."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)


class _Buffer:
    """Memory for one layer: columns [H, N] or [H, N, D], and the same memory as bytes [H, N * n],
    with n bytes per row."""

    def __init__(self, heads: int, rows: int, columns: Columns, make: Empty) -> None:
        with torch.inference_mode(False):
            self.columns = {
                name: make((heads, rows, *size), dtype) for name, (dtype, size) in columns.items()
            }
            self._bytes: list[tuple[Bytes, int]] = [
                (column.view(torch.uint8).reshape(heads, -1).numpy(), _width(*columns[name]))
                for name, column in self.columns.items()
            ]
        self.rows = rows
        self.layer: int | None = None
        self.job: Future[None] | None = None  # the read or write that uses this memory

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self.columns.values())

    def pieces(self, begin: int, end: int) -> list[Bytes]:
        """The bytes of the rows `begin` to `end`, in the order of a part."""
        return [
            head[begin * width : end * width] for column, width in self._bytes for head in column
        ]


class FileRows:
    """`Rows` in a directory that is locked against other processes, or in a file without a name.

    path: of the directory. kept: whether `close` leaves it. damage: what was damaged when the tier
    was opened, or "". ids: the token ids of the committed rows, -1 where unknown.
    """

    kind = "file"
    apart = False

    def __init__(
        self, folder: int | None, handle: int, path: Path, header: Header, *, pinned: bool
    ) -> None:
        """See `create` and `open`. folder: an open directory; None for a file without a name.
        handle: the file `rows`."""
        self._folder, self._handle, self.path, self.header = folder, handle, path, header
        self._memory = pinned_memory() if pinned else None
        self.damage, self.kept = "", True
        self._named = folder is not None
        self._segments: list[Segment] = []
        self._recorded = (0, 0)  # rows and segments in the manifest
        self._worker = ThreadPoolExecutor(1, "tier")
        self._last: Future[None] | None = None  # the last job
        self._failed: OSError | None = None  # error of a write
        self._begin = self._rows = 0  # the prompt's first new row, and the row after its last
        self._checks: dict[int, int] = {}
        self._buffers: list[_Buffer | None] = [None, None]
        self._closing = weakref.finalize(self, _close, handle, folder)  # if nobody calls `close`
        self._closing.atexit = False

    # -- a tier's life --------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        path: Path,
        layers: int,
        heads: int,
        columns: Columns,
        identity: Mapping[str, object] | None = None,
        *,
        named: bool = True,
        pinned: bool = False,
    ) -> FileRows:
        """Create a tier that only the user can read. named: as a directory; otherwise as a file
        whose name is removed at once, so that it is deleted with the process. Raises TierError,
        also if the path exists; then nothing was created."""
        folder: int | None = None
        handle = -1
        with _as_tier_error(path):
            if named:
                os.mkdir(path, 0o700)
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE
                if named:
                    folder = os.open(path, _FOLDER)
                    _lock(folder, path)
                    handle = os.open(_ROWS, flags, 0o600, dir_fd=folder)
                else:
                    handle = os.open(path, flags, 0o600)
                    os.unlink(path)
                header = Header(layers, heads, columns, identity or {})
                if folder is not None:
                    _replace_manifest(folder, written(header, ()))
                return cls(folder, handle, path, header, pinned=pinned)
            except BaseException:
                _close(handle, folder)
                if named:
                    remove(path)
                raise

    @classmethod
    def open(cls, path: Path, *, pinned: bool = False) -> FileRows:
        """Open a tier with its committed rows. Damaged ones are left out, and `damage` says so.
        Raises TierError."""
        handle = -1
        with _as_tier_error(path):
            folder = os.open(path, _FOLDER)
            try:
                _lock(folder, path)
                header, segments = _read_manifest(folder, path)
                handle = _opened(_ROWS, os.O_RDWR, folder)
                whole = _with_ids(handle, header, segments)
                made = cls(folder, handle, path, header, pinned=pinned)
            except BaseException:
                _close(handle, folder)
                raise
        made._segments, made._recorded = whole, (_count(segments), len(segments))
        if len(whole) < len(segments):
            made.damage = f"from token {made.rows:,} on it is damaged"
        return made

    def close(self) -> None:
        """Wait for writes under way, then close and unlock the tier; delete it unless `kept`.
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
        self._closing()

    def unlink(self) -> None:
        """Delete the directory. The rows stay until the tier is closed, but the next process does
        not find them."""
        named, self._named = self._named, False
        if named:
            remove(self.path)

    def move(self, path: Path) -> bool:
        """Rename the tier, also over another one, and keep it when it is closed. Returns False if
        it has no name or `path` is on another file system. Raises OSError for other failures."""
        if not self._named:
            return False
        aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, aside)
        try:
            os.rename(self.path, path)
        except OSError as error:
            with contextlib.suppress(FileNotFoundError):
                os.rename(aside, path)
            if error.errno != errno.EXDEV:
                raise
            return False
        remove(aside)
        self.path, self.kept = path, True
        return True

    def is_at(self, path: Path) -> bool:
        """Whether `path` is this tier. If so, `self.path` becomes that name."""
        try:
            same = self._folder is not None and os.path.samestat(
                os.fstat(self._folder), os.lstat(path)
            )
        except OSError:
            return False
        if same:
            self.path = path
        return same

    # -- rows -------------------------------------------------------------------------------

    def reserve(self, rows: int, have: int = 0) -> None:
        """See `Rows`. Raises TierError if the disk has no room."""
        self.drop()
        self._check_writes()
        with _as_tier_error(self.path):
            self._cut(have)
            if rows > have:
                _allocate(self._handle, self._end, self.header.segment(rows - have))
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
        """See `Rows`. Returns when the rows are written to the file; they and the manifest reach
        the disk in the background. Raises TierError if a write has failed. If one fails later, the
        next `reserve`, `commit` or `sync` raises it."""
        begin = self._begin
        assert rows == self._rows
        self.drop()
        self._check_writes()
        if rows == begin:
            return
        known = tuple(ids[begin:rows]) if len(ids) >= rows else (-1,) * (rows - begin)
        data = np.array(known, "<i4").tobytes()
        checks = zlib.crc32(data), *(self._checks[i] for i in range(self.header.layers))
        made = Segment(self._end, begin, rows - begin, rows - begin, checks, known)
        self._segments.append(made)
        self._begin = rows
        self._recorded = rows, len(self._segments)
        self._submit(self._seal, made.at, data, written(self.header, self._segments))

    def drop(self) -> None:
        """See `Rows`."""
        self._wait()
        for buffer in self._buffers:
            if buffer is not None and self._memory is not None:
                self._memory.release([*buffer.columns.values()])
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
        return _count(self._segments)

    @property
    def ids(self) -> list[int]:
        """See the class."""
        return [id for segment in self._segments for id in segment.ids[: segment.used]]

    @property
    def nbytes(self) -> int:
        """See `Rows`: bytes of the file `rows` up to the end of its last segment."""
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
            make = empty if self._memory is None else self._memory.empty
            buffer = _Buffer(header.heads, rows, header.columns, make)
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

    def _at(self, one: Segment, layer: int) -> int:
        """The offset of a layer's part of a segment."""
        return one.at + 4 * one.rows + layer * self.header.part(one.rows)

    def _load(self, layer: int, buffer: _Buffer) -> None:
        for one in self._segments:  # in this order: used rows overwrite unused ones
            pieces = buffer.pieces(one.begin, one.begin + one.rows)
            try:
                _whole(os.preadv, self._handle, pieces, self._at(one, layer))
            except OSError as error:
                raise TierError(_said(self.path, error), one.begin) from None
            if _checksum(pieces) != one.checks[1 + layer]:
                raise TierError(
                    f"{self.path.name} is damaged from token {one.begin:,} on", one.begin
                )

    def _store(self, layer: int, buffer: _Buffer) -> None:
        count = self._rows - self._begin
        pieces = buffer.pieces(self._begin, self._rows)
        self._checks[layer] = _checksum(pieces)
        at = self._at(Segment(self._end, self._begin, count, count, ()), layer)
        self._try(lambda: _whole(os.pwritev, self._handle, pieces, at))

    def _seal(self, at: int, ids: bytes, manifest: bytes) -> None:
        """Write the ids, then the manifest: the rows are on disk before it."""

        def write() -> None:
            _whole(os.pwritev, self._handle, [ids], at)
            if self._named:
                getattr(os, "fdatasync", os.fsync)(self._handle)
            self._record(manifest)

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
        last = self._segments[-1] if self._segments else None
        return 0 if last is None else last.at + self.header.segment(last.rows)

    def _record(self, manifest: bytes) -> None:
        """Replace the manifest; not that of a tier without a name, which nobody opens again."""
        if self._named and self._folder is not None:
            _replace_manifest(self._folder, manifest)

    def _check_writes(self) -> None:
        if self._failed is not None:
            raise TierError(_said(self.path, self._failed))

    def _cut(self, rows: int) -> None:
        """Keep only the first `rows` rows, and record that. Raises OSError."""
        assert rows <= self.rows
        kept = [segment for segment in self._segments if segment.begin < rows]
        if kept:
            kept[-1] = replace(kept[-1], used=rows - kept[-1].begin)
        self._segments = kept
        if self._recorded != (rows, len(kept)):
            self._record(written(self.header, kept))
            self._recorded = rows, len(kept)


# -- files ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _as_tier_error(path: Path) -> Iterator[None]:
    """Raise TierError for an OSError."""
    try:
        yield
    except OSError as error:
        raise TierError(_said(path, error)) from None


def _said(path: Path, error: OSError) -> str:
    """The message for an error with a tier."""
    if error.errno == errno.ENOTDIR and path.is_file() and not path.is_symlink():
        return f"{path.name} is of an earlier version of minikv; the documents are read again"
    return f"{path.name}: {error.strerror or error}"


def _opened(name: str, flags: int, folder: int) -> int:
    """Open a regular file of a tier that is not a link, and return its descriptor. Raises
    OSError."""
    handle = os.open(name, flags | _SAFE, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, f"{name} is not a regular file")
    return handle


def _close(handle: int, folder: int | None) -> None:
    for one in (handle, -1 if folder is None else folder):
        if one >= 0:
            with contextlib.suppress(OSError):
                os.close(one)


def _lock(folder: int, path: Path) -> None:
    """Lock the directory. Raises TierError if another process holds the lock. On a file system
    without locks, does nothing."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TierError(f"{path.name} is open in another minikv") from None
    except OSError:
        return


def _replace_manifest(folder: int, data: bytes) -> None:
    """Write a new manifest and rename it over the old one. Raises OSError; then the old one is as
    it was."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _SAFE
    with os.fdopen(os.open(_NEXT, flags, 0o600, dir_fd=folder), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(_NEXT, _MANIFEST, src_dir_fd=folder, dst_dir_fd=folder)
    os.fsync(folder)


def _whole(
    call: Callable[[int, list[memoryview], int], int],
    handle: int,
    pieces: Sequence[Bytes | bytes | bytearray],
    at: int,
) -> None:
    """Repeat `call`, which is `preadv` or `pwritev`, until all of `pieces` is transferred. Raises
    OSError, also if the file ends early."""
    left = [memoryview(piece) for piece in pieces if len(piece)][::-1]  # type: ignore[arg-type]
    while left:
        done = call(handle, left[: -_MOST - 1 : -1], at)
        if not done:
            raise OSError(errno.EIO, "the file is shorter than it was")
        at += done
        while left and done >= len(left[-1]):
            done -= len(left.pop())
        if done:
            left[-1] = left[-1][done:]


def _allocate(handle: int, at: int, size: int) -> None:
    """Reserve disk space for `size` bytes at the offset `at`. Raises OSError."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(handle, at, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    facts = os.fstatvfs(handle)  # space cannot be reserved here: check at least that it is free
    if facts.f_bavail * facts.f_frsize < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _checksum(pieces: Sequence[Bytes]) -> int:
    found = 0
    for piece in pieces:
        found = zlib.crc32(memoryview(piece), found)  # type: ignore[arg-type]
    return found


def _width(dtype: torch.dtype, size: tuple[int, ...]) -> int:
    """Bytes of one row of a column."""
    return dtype.itemsize * math.prod(size)
