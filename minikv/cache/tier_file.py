"""A tier in a file: what was read stays on disk, and one layer of it at a time is in memory.

Layout, in pages of 4 KiB, little-endian:

    page 0        what the file is: layers, heads, columns, and the identity of what it belongs to
    pages 1, 2    commit records, written in turn; the valid one with the higher number counts
    page 3 ...    segments, one for each prompt: its head, then one part for each layer

A head has the position of the segment's first row, a checksum of each part, and the token ids. A
part is [column][KV head][row], so that one `preadv` brings a layer's rows of a segment to their
places in [KV head][row] columns. Head and parts begin at a page and are filled up with zeros.

A prompt writes its parts, then its head, then a commit record, each on disk before the next begins.
What is behind the last commit is ignored. A conversation that became shorter gets a commit record
with fewer segments and rows before anything of it is overwritten; of the last one then only its
first rows are used. Every byte up to the end is covered by a checksum: of the head's, the records'
and the parts' pages.

One thread of its own does all reading and writing in order. So a layer's rows are read while the
layer before is computed, and written while the next ones are.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minikv.cache.tier_rows import Columns, TierError

PAGE = 4096
_FIRST = 3 * PAGE  # where segments begin
_MAGIC = b"minikv tier 1\n"
_TOP = struct.Struct(f"<{len(_MAGIC)}sI")  # magic, bytes of JSON
_RECORD = struct.Struct("<8sQQQI")  # mark, number, rows, segments, checksum of their heads
_HEAD = struct.Struct("<8sQQI")  # mark, first row, rows, layers
_COMMIT, _SEGMENT = b"commit\n\0", b"segment\0"
_CHECK = struct.Struct("<I")
_MOST = 512  # pieces of one call; systems allow 1,024
_MOST_ROWS = 1 << 31

_KINDS = {
    str(kind).removeprefix("torch."): kind
    for kind in (torch.float32, torch.bfloat16, torch.float16, torch.int8)
}

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    """Rows of one prompt. `used`: those that the conversation still has. `at`: its head."""

    at: int
    begin: int
    rows: int
    used: int
    checks: tuple[int, ...]
    ids: tuple[int, ...]
    chain: int  # checksum of this head and of all before it


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself. `columns`: dtype and size of one row of each, by name."""

    layers: int
    heads: int
    columns: Columns
    identity: Mapping[str, object]


class _Buffer:
    """Room for one layer: columns [H, N] or [H, N, D], and the same memory as bytes [H, N * n]."""

    def __init__(self, heads: int, rows: int, columns: Columns, *, pinned: bool) -> None:
        with torch.inference_mode(False):
            self.columns = {
                name: torch.empty((heads, rows, *size), dtype=dtype, pin_memory=pinned and rows > 0)
                for name, (dtype, size) in columns.items()
            }
            self._bytes: list[tuple[Bytes, int]] = [
                (column.view(torch.uint8).reshape(heads, -1).numpy(), _width(*columns[name]))
                for name, column in self.columns.items()
            ]
        self.rows = rows
        self.layer: int | None = None
        self.job: Future[None] | None = None  # what is being done with it

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self.columns.values())

    def pieces(self, begin: int, end: int) -> list[Bytes]:
        """The bytes of these rows, in the order of a part."""
        return [
            head[begin * width : end * width] for column, width in self._bytes for head in column
        ]


class FileRows:
    """`Rows` in a file, which nobody else has open.

    `path`: where it is. `kept`: it stays when it is closed. `damage`: what was found wrong when it
    was opened, else "". `ids`: the token ids of the rows that were committed, -1 where they were
    not said.
    """

    kind = "file"
    apart = False

    def __init__(self, handle: int, path: Path, header: Header, *, pinned: bool = False) -> None:
        """See `create` and `open`."""
        self._handle, self.path, self.header = handle, path, header
        self._pinned, self.damage, self.kept = pinned, "", True
        self._named = True
        self._segments: list[_Segment] = []
        self._number = 0  # of the last commit record
        self._recorded = (0, 0)  # rows and segments that it has
        self._worker = ThreadPoolExecutor(1, "tier")
        self._last: Future[None] | None = None  # the last job
        self._failed: OSError | None = None  # of a write
        self._begin = self._rows = 0  # the prompt's first new row, and its last one's successor
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
        """A new file, the user's alone. Raises TierError; then there is none."""
        header = Header(layers, heads, columns, identity or {})
        try:
            handle = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise TierError(_said(path, error)) from None
        try:
            _lock(handle, path)
            _whole(os.pwritev, handle, [_top(header), bytes(2 * PAGE)], 0)
        except BaseException as error:
            os.close(handle)
            with contextlib.suppress(OSError):
                os.unlink(path)
            if isinstance(error, OSError):
                raise TierError(_said(path, error)) from None
            raise
        return cls(handle, path, header, pinned=pinned)

    @classmethod
    def open(cls, path: Path, *, pinned: bool = False) -> FileRows:
        """What was committed to a file. Raises TierError. What is damaged is left out, and
        `damage` says so."""
        handle = _opened(path, _FLAGS)
        try:
            _lock(handle, path)
            made = cls(handle, path, _header(handle, path), pinned=pinned)
            made._recall()
        except OSError as error:
            os.close(handle)
            raise TierError(_said(path, error)) from None
        except BaseException:
            os.close(handle)
            raise
        return made

    def close(self) -> None:
        """Wait for what is being written, and let others open the file. Cannot fail."""
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
            os.close(handle)

    def unlink(self) -> None:
        """Take its name away: it is gone once it is closed, however the process ends."""
        named, self._named = self._named, False
        if named:
            with contextlib.suppress(OSError):
                os.unlink(self.path)

    def move(self, path: Path) -> bool:
        """Have another name on the same disk, and stay there. Whether that could be; raises
        OSError."""
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
        """Whether this file is there now; if so, that is its name from now on."""
        try:
            same = os.path.samestat(os.fstat(self._handle), os.lstat(path))
        except OSError:
            return False
        if same:
            self.path = path
        return same

    # -- rows -------------------------------------------------------------------------------

    def reserve(self, rows: int, have: int = 0) -> None:
        """See `Rows`. Raises TierError where the disk has no room."""
        self.drop()
        self._check_writes()
        try:
            self._cut(have)
            if rows > have:
                at, header = self._end, self.header
                size = _head_size(rows - have, header.layers)
                size += self._part(rows - have) * header.layers
                _allocate(self._handle, at, size)
        except OSError as error:
            raise TierError(_said(self.path, error)) from None
        self._begin, self._rows = have, rows

    def read(self, layer: int, count: int) -> Mapping[str, Tensor]:
        """See `Rows`. Raises TierError where the file is damaged. Between two of `reserve`,
        `commit` and `drop` no later `count` is larger than the first."""
        buffer = self._taken(layer, count)
        following = layer + 1
        if self.rows and following < self.header.layers:
            ahead = self._buffer(following, count)
            if ahead.layer != following:
                ahead.layer = following
                ahead.job = self._submit(self._load, following, ahead)
        return {name: column[:, :count] for name, column in buffer.columns.items()}

    def write(self, layer: int, begin: int, columns: Mapping[str, Tensor]) -> None:
        """See `Rows`. What goes wrong is said by `commit`."""
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
        """See `Rows`. Returns when the rows are written, and while they are brought to the disk.
        Raises TierError where that fails; the next `reserve` or `sync` does where it fails
        later."""
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
        head = _head(begin, checks, known)
        before = self._segments[-1].chain if self._segments else 0
        made = _Segment(
            self._end, begin, rows - begin, rows - begin, checks, known, zlib.crc32(head, before)
        )
        self._segments.append(made)
        self._begin = rows
        self._number += 1
        self._recorded = self.rows, len(self._segments)
        self._submit(self._seal, made.at, head, self._record(), PAGE * (1 + self._number % 2))

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
        """Wait until all that was committed is on disk. Raises TierError."""
        self._wait()
        self._check_writes()

    @property
    def rows(self) -> int:
        """Rows that were committed."""
        return self._segments[-1].begin + self._segments[-1].used if self._segments else 0

    @property
    def ids(self) -> list[int]:
        """See the class."""
        return [id for segment in self._segments for id in segment.ids[: segment.used]]

    @property
    def nbytes(self) -> int:
        """See `Rows`: bytes of the file."""
        return self._end

    @property
    def working(self) -> int:
        """See `Rows`: two layers."""
        return sum(buffer.nbytes for buffer in self._buffers if buffer is not None)

    # -- the layer at hand --------------------------------------------------------------------

    def _buffer(self, layer: int, count: int) -> _Buffer:
        """The memory that the layer goes through; every second one has the same. It has room for
        `count` rows, and for all that are stored."""
        buffer = self._buffers[layer % 2]
        if buffer is None:
            # The last rows of a segment may be unused, and are read with the others.
            stored = max((s.begin + s.rows for s in self._segments), default=0)
            header, rows = self.header, max(count, self._rows, stored)
            buffer = _Buffer(header.heads, rows, header.columns, pinned=self._pinned)
            self._buffers[layer % 2] = buffer
        assert count <= buffer.rows
        return buffer

    def _taken(self, layer: int, count: int = 0) -> _Buffer:
        """The memory with the layer's rows in it, when nothing is being done with it any more."""
        buffer = self._buffer(layer, count)
        if buffer.layer != layer:
            if buffer.job is not None:
                with contextlib.suppress(TierError):  # of a layer that nobody took
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
        """Until nothing is being done."""
        if self._last is not None:
            with contextlib.suppress(Exception):  # whoever wanted it was told
                self._last.result()
            self._last = None

    def _load(self, layer: int, buffer: _Buffer) -> None:
        for segment in self._segments:  # in this order: rows that are no longer used come first
            part = self._part(segment.rows)
            pieces = buffer.pieces(segment.begin, segment.begin + segment.rows)
            pieces.append(np.empty(part - sum(map(len, pieces)), np.uint8))
            at = segment.at + _head_size(segment.rows, self.header.layers) + layer * part
            try:
                _whole(os.preadv, self._handle, pieces, at)
            except OSError as error:
                raise TierError(_said(self.path, error), segment.begin) from None
            if _checksum(pieces) != segment.checks[layer]:
                raise TierError(
                    f"{self.path.name} is damaged from token {segment.begin:,} on", segment.begin
                )

    def _store(self, layer: int, buffer: _Buffer) -> None:
        count = self._rows - self._begin
        pieces = buffer.pieces(self._begin, self._rows)
        part = self._part(count)
        pieces.append(np.zeros(part - sum(map(len, pieces)), np.uint8))
        self._checks[layer] = _checksum(pieces)
        at = self._end + _head_size(count, self.header.layers) + layer * part
        self._try(lambda: _whole(os.pwritev, self._handle, pieces, at))

    def _seal(self, at: int, head: bytes, record: bytes, place: int) -> None:
        """Each on disk before the next."""

        def write() -> None:
            _whole(os.pwritev, self._handle, [head], at)
            self._to_disk()
            _whole(os.pwritev, self._handle, [record], place)
            self._to_disk()

        self._try(write)

    def _try(self, write: Callable[[], None]) -> None:
        """Nothing is written after what could not be."""
        if self._failed is None:
            try:
                write()
            except OSError as error:
                self._failed = error

    # -- the file -----------------------------------------------------------------------------

    @property
    def _end(self) -> int:
        """Behind the last segment."""
        return self._behind(self._segments[-1] if self._segments else None)

    def _behind(self, last: _Segment | None) -> int:
        """Where the segment after this one begins."""
        if last is None:
            return _FIRST
        layers = self.header.layers
        return last.at + _head_size(last.rows, layers) + layers * self._part(last.rows)

    def _part(self, rows: int) -> int:
        """Bytes of a layer's part."""
        header = self.header
        return _pages(rows * header.heads * sum(_width(*kind) for kind in header.columns.values()))

    def _to_disk(self) -> None:
        """Have what was written on disk. A file without a name is gone with the process, so that
        there nobody needs it: what could not be written is found by its checksum."""
        if self._named:
            getattr(os, "fdatasync", os.fsync)(self._handle)

    def _check_writes(self) -> None:
        if self._failed is not None:
            raise TierError(_said(self.path, self._failed))

    def _cut(self, rows: int) -> None:
        """Have only so many rows, also in the file. Raises OSError."""
        assert rows <= self.rows
        kept = [segment for segment in self._segments if segment.begin < rows]
        if kept:
            kept[-1] = replace(kept[-1], used=rows - kept[-1].begin)
        self._segments = kept
        if self._recorded != (rows, len(kept)):
            self._number += 1
            at = PAGE * (1 + self._number % 2)
            _whole(os.pwritev, self._handle, [self._record()], at)
            self._to_disk()
            self._recorded = rows, len(kept)

    def _record(self) -> bytes:
        chain = self._segments[-1].chain if self._segments else 0
        return _sealed(
            _RECORD.pack(_COMMIT, self._number, self.rows, len(self._segments), chain), PAGE
        )

    def _recall(self) -> None:
        """Find what was committed. Raises OSError."""
        found: list[tuple[int, int, int, int]] = []
        for place in (PAGE, 2 * PAGE):
            page = _read(self._handle, PAGE, place)
            if _intact(page):
                mark, *record = _RECORD.unpack_from(page)
                if mark == _COMMIT:
                    found.append(tuple(record))
                    continue
            if page.strip(b"\0"):
                self.damage = "one of its commit records cannot be read"
        if not found:
            return
        number, rows, count, chain = max(found)
        if len(found) < 2 <= number:  # there was one before it
            self.damage = "one of its commit records cannot be read"
        self._number, self._recorded = number, (rows, count)
        segments: list[_Segment] = []
        while len(segments) < count:
            segment = self._segment(segments[-1] if segments else None)
            if segment is None:
                break
            segments.append(segment)
        if len(segments) == count and segments and segments[-1].chain != chain:
            segments.pop()  # it is another one than the record's
        if segments and len(segments) < count:
            rows = min(rows, segments[-1].begin + segments[-1].rows)
        ends = [*(segment.begin for segment in segments[1:]), rows]
        self._segments = [
            replace(segment, used=end - segment.begin)
            for segment, end in zip(segments, ends, strict=False)
        ]
        if len(segments) < count:
            self.damage = f"from token {self.rows:,} on it is damaged"

    def _segment(self, last: _Segment | None) -> _Segment | None:
        """The segment behind this one; None if it is damaged. Raises OSError."""
        layers, at = self.header.layers, self._behind(last)
        size = os.fstat(self._handle).st_size
        if at + PAGE > size:
            return None
        mark, begin, rows, said = _HEAD.unpack_from(_read(self._handle, PAGE, at))
        if mark != _SEGMENT or said != layers or not 0 < rows < _MOST_ROWS:
            return None
        length = _head_size(rows, layers)
        if at + length + layers * self._part(rows) > size:
            return None
        head = _read(self._handle, length, at)
        first = 0 if last is None else last.begin + 1
        most = 0 if last is None else last.begin + last.rows
        if not _intact(head) or not first <= begin <= most:
            return None
        checks = np.frombuffer(head, "<u4", layers, _HEAD.size)
        ids = np.frombuffer(head, "<i4", rows, _HEAD.size + 4 * layers)
        chain = zlib.crc32(head, last.chain if last else 0)
        return _Segment(at, begin, rows, rows, tuple(checks.tolist()), tuple(ids.tolist()), chain)


def header_of(path: Path) -> Header:
    """What a file says of itself; others may have it open. Raises TierError."""
    handle = _opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return _header(handle, path)
    except OSError as error:
        raise TierError(_said(path, error)) from None
    finally:
        os.close(handle)


def is_open(path: Path) -> bool:
    """Whether somebody has this file open as a tier. Raises OSError where that cannot be known."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


# -- bytes ------------------------------------------------------------------------------------

_LARGEST = 1 << 20  # layers, heads, or numbers of a row that a file may claim
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def _opened(path: Path, flags: int) -> int:
    """A regular file, no link. Raises TierError."""
    try:
        handle = os.open(path, flags)
    except OSError as error:
        raise TierError(_said(path, error)) from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise TierError(f"{path.name} is not a regular file")
    return handle


def _lock(handle: int, path: Path) -> None:
    """Raises TierError if another one has the file; where locks do not work, nobody is asked."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TierError(f"{path.name} is open in another minikv") from None
    except OSError:
        return


def _header(handle: int, path: Path) -> Header:
    page = _read(handle, PAGE, 0)
    magic, length = _TOP.unpack_from(page)
    if magic != _MAGIC or not _intact(page):
        raise TierError(f"{path.name} is damaged at its beginning, or of another version")
    try:
        made = json.loads(page[_TOP.size : _TOP.size + length])
        columns = {
            name: (_KINDS[kind], tuple(size)) for name, (kind, size) in made["columns"].items()
        }
        sizes = [made["layers"], made["heads"], *(n for _, size in columns.values() for n in size)]
        if not columns or not all(type(n) is int and 0 < n < _LARGEST for n in sizes):
            raise ValueError(sizes)
        return Header(made["layers"], made["heads"], columns, made["identity"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise TierError(f"{path.name} does not say what it is") from None


def _top(header: Header) -> bytes:
    columns = {
        name: (str(dtype).removeprefix("torch."), size)
        for name, (dtype, size) in header.columns.items()
    }
    text = json.dumps(
        {
            "layers": header.layers,
            "heads": header.heads,
            "columns": columns,
            "identity": header.identity,
        }
    ).encode()
    assert len(text) <= PAGE - _TOP.size - _CHECK.size
    return _sealed(_TOP.pack(_MAGIC, len(text)) + text, PAGE)


def _head(begin: int, checks: Sequence[int], ids: Sequence[int]) -> bytes:
    text = _HEAD.pack(_SEGMENT, begin, len(ids), len(checks))
    text += np.array(checks, "<u4").tobytes() + np.array(ids, "<i4").tobytes()
    return _sealed(text, _head_size(len(ids), len(checks)))


def _head_size(rows: int, layers: int) -> int:
    return _pages(_HEAD.size + 4 * layers + 4 * rows + _CHECK.size)


def _sealed(text: bytes, size: int) -> bytes:
    """Filled up with zeros, and a checksum of all of it at the end."""
    text += bytes(size - _CHECK.size - len(text))
    return text + _CHECK.pack(zlib.crc32(text))


def _intact(page: bytes) -> bool:
    found: int = _CHECK.unpack_from(page, len(page) - _CHECK.size)[0]
    return found == zlib.crc32(memoryview(page)[: -_CHECK.size])


def _checksum(pieces: Sequence[Bytes]) -> int:
    """Sums of 512 words each, which run at the speed of memory, and a CRC of those. Any change of
    one word is found, and of several all but one in 2**32."""
    found = 0
    for piece in pieces:
        whole = len(piece) // PAGE * PAGE
        if whole:
            words = piece[:whole].view(np.uint64).reshape(-1, PAGE // 8)
            found = zlib.crc32(words.sum(1, dtype=np.uint64).tobytes(), found)
        found = zlib.crc32(piece[whole:].tobytes(), found)
    return found


def _width(dtype: torch.dtype, size: tuple[int, ...]) -> int:
    """Bytes of one row of a column."""
    return dtype.itemsize * (size[0] if size else 1)


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _read(handle: int, size: int, at: int) -> bytes:
    data = bytearray(size)
    _whole(os.preadv, handle, [data], at)
    return bytes(data)


def _whole(
    call: Callable[[int, list[memoryview], int], int],
    handle: int,
    pieces: Sequence[Bytes | bytes | bytearray],
    at: int,
) -> None:
    """`preadv` or `pwritev` of everything. Raises OSError, also where the file ends."""
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
    """Have room on the disk. Raises OSError."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(handle, at, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    facts = os.fstatvfs(handle)  # a disk that cannot keep room: at least it has some
    if facts.f_bavail * facts.f_frsize < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _said(path: Path, error: OSError) -> str:
    return f"{path.name}: {error.strerror or error}"
