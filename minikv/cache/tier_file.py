"""`FileRows`: the rows of a tier on disk. At most two layers of them are in memory.

A tier is a directory with two files. `rows` has one segment per prompt, one after the other. A
segment has one part per layer, ordered [column][KV head][row], so that one `preadv` reads a layer's
rows of a segment into [KV head][row] columns. `manifest` says which rows are valid: a first line
with the format and a CRC of all that follows, then JSON with layers, heads, columns, the identity
of the model, the token ids of all rows, and for each segment its first position, its number of rows
and the CRCs of its parts. Anything after the last segment is ignored. A tier may begin with the
rows of another one, which never change: then the first segments are in files `base1` and so on,
which are hard links to the other tier's files.

A prompt writes its segment, which is on disk before a new manifest replaces the old one. When a
conversation becomes shorter, a manifest with fewer rows is on disk before anything is overwritten;
then only the first rows of the last segment are used. So after a crash the last manifest and all
segments that it names are complete. If a part is damaged nevertheless, that is detected when this
process first reads it, even if the process wrote it itself.

The directory is locked against other processes. A tier without a name is only the file `rows`,
which is deleted when the process ends. A separate thread does all reading and writing, in order. So
a layer's rows are read while the previous layer is computed, and written while the next layers are
computed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minikv.cache.tier_rows import Columns, Memory, Slots, TierError, put, width

MAGIC = b"minikv tier 3 %08x\n"
_LINE = len(MAGIC % 0)
_ROWS, _BASE, _MANIFEST, _NEXT = "rows", "base%d", "manifest", "manifest.next"
_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = _SAFE | os.O_RDONLY | os.O_DIRECTORY
_NEW = _SAFE | os.O_RDWR | os.O_CREAT | os.O_EXCL
_MOST_BASES = 4096
_MOST_BYTES = 64 << 20  # of a manifest; with 5,000 prompts, 100 layers and 1M rows it has 14 MB

_KINDS = {
    str(kind).removeprefix("torch."): kind
    for kind in (torch.float32, torch.bfloat16, torch.float16, torch.int8)
}


@dataclass(frozen=True, slots=True)
class Header:
    """Describes the contents of a tier. columns: dtype and size of one row of each, by name.
    identity: the model that the rows belong to; other modules write and compare it. about: a
    description for people."""

    layers: int
    heads: int
    columns: Columns
    identity: Mapping[str, object] = field(default_factory=dict)
    about: str = field(default="", compare=False)

    def part(self, rows: int) -> int:
        """Bytes of a layer's part of a segment."""
        return self.heads * rows * width(self.columns)


@dataclass(slots=True)
class Segment:
    """The rows of one prompt. at: its offset in bytes. begin: position of its first row. rows: how
    many it has; those from the next segment's `begin` on are not used. checks: the CRC of each
    layer's part. file: 0 for `rows`, n for the n-th base. sound: layers whose part was read and
    found undamaged."""

    at: int
    begin: int
    rows: int
    checks: list[int]
    file: int = 0
    sound: set[int] = field(default_factory=set)


# -- the manifest -----------------------------------------------------------------------------


def written(header: Header, segments: Sequence[Segment], ids: Sequence[int]) -> bytes:
    """The bytes of a manifest. ids: the token ids of all valid rows."""
    columns = {
        name: (str(dtype).removeprefix("torch."), size)
        for name, (dtype, size) in header.columns.items()
    }
    made = {
        "layers": header.layers,
        "heads": header.heads,
        "columns": columns,
        "identity": header.identity,
        "about": header.about,
        "ids": ids,
        "segments": [(one.begin, one.rows, one.checks) for one in segments],
        "files": [one.file for one in segments],
    }
    return sealed(json.dumps(made).encode())


def sealed(text: bytes) -> bytes:
    """A manifest's first line, followed by `text`."""
    return MAGIC % zlib.crc32(text) + text


def parsed(data: bytes, name: str) -> tuple[Header, list[Segment], list[int]]:
    """The contents of a manifest: header, segments and ids. Raises TierError if it is damaged or
    impossible. name: the tier's, for the message."""
    text = data[_LINE:]
    if data[:_LINE] != MAGIC % zlib.crc32(text):
        raise TierError(f"{name} is damaged, or of another version of minikv")
    try:
        made = json.loads(text)
        columns = {
            column: (_KINDS[kind], tuple(size)) for column, (kind, size) in made["columns"].items()
        }
        about = str(made.get("about", ""))
        if not isinstance(made["identity"], dict):
            raise TypeError("identity")
        header = Header(made["layers"], made["heads"], columns, made["identity"], about)
        ids, segments = made["ids"], made["segments"]
        files = made.get("files", [0] * len(segments))
        places = [n for begin, rows, _ in segments for n in (begin, rows)]
        counts = header.layers, header.part(1), *ids, *files, *places
        if not all(type(n) is int and -1 <= n < 1 << 40 for n in counts):
            raise ValueError(counts)
        ends = [*(begin for begin, _, _ in segments), len(ids)]
        if ends[0] or not columns or min(header.layers, header.heads) < 1:
            raise ValueError("rows without a segment, a column, a layer or a head")
        at = dict.fromkeys(files, 0)
        known = all(0 <= file <= _MOST_BASES for file in at)
        if len(files) != len(segments) or not known:
            raise ValueError(files)
        for i, (begin, rows, checks) in enumerate(segments):
            if not begin < ends[i + 1] <= begin + rows or len(checks) != header.layers:
                raise ValueError(begin)
            segments[i] = Segment(at[files[i]], begin, rows, checks, files[i])
            at[files[i]] += header.layers * header.part(rows)
        return header, segments, ids
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise TierError(f"the manifest of {name} is invalid") from None


def is_open(path: Path) -> bool:
    """Whether a process has this open as a tier. Raises OSError if that cannot be determined."""
    with contextlib.ExitStack() as opened:
        try:
            _lock(_opened(path, _SAFE | os.O_RDONLY, opened), path)
        except TierError:
            return True
    return False


def remove(path: Path) -> None:
    """Delete a tier, or a file at its path. Cannot fail."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)


class FileRows:
    """The rows of a tier on disk, with the methods of `RamRows`: in a directory that is locked
    against other processes, or in a file without a name.

    path: of the directory. header: see `Header`. kept: whether `close` leaves the tier on disk.
    damage: what was damaged when the tier was opened, or "". ids: the token ids of the committed
    rows, -1 where unknown.
    """

    kind = "file"
    apart = False

    def __init__(
        self,
        path: Path,
        header: Header,
        handle: int,
        folder: int | None,
        opened: contextlib.ExitStack,
        *,
        pinned: bool,
    ) -> None:
        """See `create` and `open`. handle: the file `rows`. folder: an open directory; None for a
        file without a name. opened: closes both, in `close` or when this object is
        garbage-collected."""
        self.path, self.header, self._folder, self._opened = path, header, folder, opened
        self._files = [handle]  # `rows`, and the bases
        self._pinned = pinned
        self.memory = Memory(torch.device("cuda" if pinned else "cpu"))
        self.damage, self.kept = "", True
        self.ids: list[int] = []
        self._segments: list[Segment] = []
        self._stated = 0  # rows in the manifest
        self._new = Segment(0, 0, 0, [])  # that of the prompt under way
        self._slots: Slots | None = None
        self._worker = ThreadPoolExecutor(1, "tier")
        self._last: Future[None] | None = None  # the last job
        # Writes that may have failed: of committed rows, and of the prompt under way.
        self._writes: list[Future[None]] = []
        self._saves: list[Future[None]] = []
        self._closing = weakref.finalize(self, opened.close)

    # -- a tier's life --------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        path: Path,
        header: Header,
        *,
        named: bool = True,
        pinned: bool = False,
    ) -> FileRows:
        """Create a tier that only the user can read. named: as a directory; otherwise as a file
        whose name is removed at once, so that it is deleted when the process ends. pinned: for a
        GPU. Raises TierError, for example if the path exists; then nothing was created."""
        folder = None
        with _as_tier_error(path), contextlib.ExitStack() as undo:
            opened = undo.enter_context(contextlib.ExitStack())
            if named:
                os.mkdir(path, 0o700)
                undo.callback(remove, path)
                folder = _opened(path, _FOLDER, opened)
                _lock(folder, path)
                handle = _opened(_ROWS, _NEW, opened, folder)
                _replace_manifest(folder, written(header, (), ()))
            else:
                handle = _opened(path, _NEW, opened)
                os.unlink(path)
            undo.pop_all()
        return cls(path, header, handle, folder, opened, pinned=pinned)

    @classmethod
    def open(cls, path: Path, *, pinned: bool = False, shared: bool = False) -> FileRows:
        """Open a tier with its committed rows. If a file is too short for a segment, it and later
        ones are left out, and `damage` says so. shared: read-only, other processes may have it open
        too. Raises TierError."""
        with _as_tier_error(path), contextlib.ExitStack() as opened:
            folder = _opened(path, _FOLDER, opened)
            if not shared:
                _lock(folder, path)
            manifest = os.open(_MANIFEST, os.O_RDONLY | _SAFE, dir_fd=folder)
            with os.fdopen(manifest, "rb") as file:
                header, segments, ids = parsed(file.read(_MOST_BYTES) or b"", path.name)
            handle = _opened(_ROWS, _SAFE | (os.O_RDONLY if shared else os.O_RDWR), opened, folder)
            made = cls(path, header, handle, folder, opened.pop_all(), pinned=pinned)
            made._open_bases(max((one.file for one in segments), default=0))
            sizes = [os.fstat(file).st_size for file in made._files]
        fits = [made._at(one, header.layers) <= sizes[one.file] for one in segments]
        made._segments = segments[: fits.index(False)] if False in fits else [*segments]
        made.ids, made._stated = ids, len(ids)
        if len(made._segments) < len(segments):  # the others extend past the end of the file
            first = segments[len(made._segments)].begin
            made.damage = f"from token {first:,} on it is damaged"
            del ids[first:]
        return made

    def close(self) -> None:
        """Wait for pending writes, then close and unlock the tier; delete it unless `kept`. Cannot
        fail."""
        if not self._closing.alive:
            return
        self.drop()
        self._worker.shutdown()
        if self._folder is not None and not self.kept:
            remove(self.path)
        if self._stated <= self.rows:  # otherwise the manifest still names later rows
            with contextlib.suppress(OSError):
                os.ftruncate(self._files[0], self._end)
        self._closing()

    def move(self, path: Path) -> bool:
        """Rename the tier to `path`, replacing anything there, and keep it when it is closed.
        Returns False if it has no name or `path` is on another file system. Raises OSError for
        other failures."""
        if self._folder is None:
            return False
        try:
            remove(path)
            os.rename(self.path, path)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            return False
        self.path, self.kept = path, True
        return True

    def publish(self, path: Path) -> None:
        """Rename the tier to `path` as soon as all committed rows are on disk, and keep it when it
        is closed. This happens in the background; if a write fails, the tier stays as it is."""
        writes = [*self._writes]

        def rename() -> None:
            for write in writes:
                write.result()
            os.rename(self.path, path)
            self.path, self.kept = path, True

        self._submit(rename)

    def rest_on(self, other: FileRows, ids: Sequence[int]) -> None:
        """Begin with the rows of `other` for the token ids `ids`, without copying them. This tier
        must be empty; `other` may be closed afterwards, but its rows must not change. Raises
        TierError, for example if they are on another disk."""
        assert not self._segments
        used = [one for one in other._segments if one.begin < len(ids)]
        files = sorted({one.file for one in used})
        with _as_tier_error(self.path):
            for number, file in enumerate(files, 1):
                if self._folder is None:
                    self._files.append(os.dup(other._files[file]))
                    self._opened.callback(os.close, self._files[-1])
                else:
                    name = _BASE % file if file else _ROWS
                    os.link(name, _BASE % number, src_dir_fd=other._folder, dst_dir_fd=self._folder)
            if self._folder is not None:
                self._open_bases(len(files))
            self._segments = [replace(one, file=1 + files.index(one.file)) for one in used]
            self.ids, self._stated = [*ids], len(ids)
            self._state(self._segments, self.ids)

    def _open_bases(self, count: int) -> None:
        """Open the first `count` bases. Raises OSError."""
        for number in range(1, count + 1):
            flags = _SAFE | os.O_RDONLY
            self._files.append(_opened(_BASE % number, flags, self._opened, self._folder))

    def is_at(self, path: Path) -> bool:
        """Whether `path` is this tier. If so, `self.path` becomes `path`."""
        try:
            same = self._folder is not None and os.path.samestat(
                os.fstat(self._folder), os.lstat(path)
            )
        except OSError:
            return False
        if same:
            self.path = path
        return same

    # -- a prompt -------------------------------------------------------------------------------

    def reserve(self, rows: int, have: int = 0) -> None:
        """See `RamRows`. Raises TierError if the disk has no room."""
        assert have <= self.rows
        self.drop()
        self._saves.clear()  # those of an abandoned prompt do not matter
        self.sync()
        with _as_tier_error(self.path):
            self._cut(have)
            if rows > have:
                size = self.header.layers * self.header.part(rows - have)
                _allocate(self._files[0], self._end, size)
        self._new = Segment(self._end, have, rows - have, [0] * self.header.layers)

    def _cut(self, rows: int) -> None:
        """Keep only the first `rows` rows, and write that to the manifest. Raises OSError."""
        self._segments = [one for one in self._segments if one.begin < rows]
        del self.ids[rows:]
        if rows < self._stated:
            self._state(self._segments, self.ids)
            self._stated = rows

    def _state(self, segments: Sequence[Segment], ids: Sequence[int]) -> None:
        """Replace the manifest. A tier without a name has none, because nobody opens it again."""
        if self._folder is not None:
            _replace_manifest(self._folder, written(self.header, segments, ids))

    def read(self, layer: int, count: int) -> Mapping[str, Tensor]:
        """See `RamRows`. Raises TierError if the file is damaged. The first call after `reserve`,
        `commit` or `drop` must have the largest `count`."""
        return {name: column[:, :count] for name, column in self._slot(layer, count).items()}

    def write(self, layer: int, begin: int, columns: Mapping[str, Tensor]) -> None:
        """See `RamRows`. `commit` raises the errors of writes."""
        if self._new.rows:
            slot = self._slot(layer, 0)
            put(slot, begin, columns, wait=True)  # the thread reads it
            self._saves.append(self._submit(self._save, layer, slot))

    def commit(self, rows: int, ids: Sequence[int] = ()) -> None:
        """See `RamRows`. Returns when the rows are written to the file; they and the manifest reach
        the disk in the background. Raises TierError if a write has failed. If one fails later, the
        next `reserve`, `commit` or `sync` raises the error."""
        made, begin = self._new, self._new.begin
        assert rows == begin + made.rows
        self.drop()
        self.sync()
        if rows == begin:
            return
        self._segments.append(made)
        self.ids += ids[begin:rows] if len(ids) >= rows else [-1] * made.rows
        self._new = Segment(self._end, rows, 0, [])
        self._stated = rows
        self._writes.append(self._submit(self._seal, [*self._segments], [*self.ids]))

    def drop(self) -> None:
        """See `RamRows`."""
        if self._last is not None:
            with contextlib.suppress(Exception):  # raised where the result is used
                self._last.result()
            self._last = None
        for slot in () if self._slots is None else self._slots.columns:
            self.memory.release(slot)
        self._slots = None

    def sync(self) -> None:
        """Wait until everything committed is on disk. Raises TierError if a write has failed."""
        writes, self._writes, self._saves = self._writes + self._saves, [], []
        with _as_tier_error(self.path):
            for write in writes:
                write.result()

    @property
    def rows(self) -> int:
        """How many rows are committed."""
        return len(self.ids)

    @property
    def slots(self) -> int:
        """How many layers are in memory while a prompt is read: two, if one is read from the file
        or copied from a GPU while another is computed. Otherwise one, because writing a layer takes
        hardly any time compared to computing it."""
        return min(2 if self._segments or self._pinned else 1, self.header.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return sum(self.header.layers * self.header.part(one.rows) for one in self._segments)

    @property
    def _end(self) -> int:
        """Where the last segment in the file `rows` ends."""
        own = [one for one in self._segments if not one.file]
        return self._at(own[-1], self.header.layers) if own else 0

    def _slot(self, layer: int, count: int) -> Mapping[str, Tensor]:
        """The layer's rows, in memory for `count` rows, the prompt's rows and all stored ones: the
        unused last rows of a segment are read with the others."""
        if self._slots is None:
            header, segments = self.header, [self._new, *self._segments]
            room = max(count, *(one.begin + one.rows for one in segments))
            slots = [
                self.memory.columns(header.columns, header.heads, room) for _ in range(self.slots)
            ]
            fill = partial(self._submit, self._load)
            self._slots = Slots(slots, header.layers, fill, Future.result)
        return self._slots.layer(layer)

    # -- in the thread --------------------------------------------------------------------------

    def _submit(self, job: Callable[..., None], *arguments: Any) -> Future[None]:
        self._last = self._worker.submit(job, *arguments)
        return self._last

    def _load(self, layer: int, into: Mapping[str, Tensor]) -> None:
        for one in self._segments:  # in this order: used rows overwrite unused ones
            pieces = _pieces(into, one)
            with _as_tier_error(self.path, one.begin):
                _transfer(os.preadv, self._files[one.file], pieces, self._at(one, layer))
            if layer not in one.sound:
                if _checksum(pieces) != one.checks[layer]:
                    name = self.path.name
                    raise TierError(f"{name} is damaged from token {one.begin:,} on", one.begin)
                one.sound.add(layer)

    def _save(self, layer: int, columns: Mapping[str, Tensor]) -> None:
        pieces = _pieces(columns, self._new)
        self._new.checks[layer] = _checksum(pieces)
        _transfer(os.pwritev, self._files[0], pieces, self._at(self._new, layer))

    def _seal(self, segments: Sequence[Segment], ids: Sequence[int]) -> None:
        """Write the manifest, after the rows are on disk."""
        if self._folder is not None:
            getattr(os, "fdatasync", os.fsync)(self._files[0])
        self._state(segments, ids)

    def _at(self, one: Segment, layer: int) -> int:
        """The offset of a layer's part of a segment. For `layer` equal to the number of layers: the
        segment's end."""
        return one.at + layer * self.header.part(one.rows)


# -- files ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _as_tier_error(path: Path, rows: int | None = None) -> Iterator[None]:
    """Raise TierError for an OSError."""
    try:
        yield
    except NotADirectoryError:
        raise TierError(f"an earlier version wrote {path.name}, as one file", rows) from None
    except OSError as error:
        raise TierError(f"{path.name}: {error.strerror or error}", rows) from None


def _opened(
    path: Path | str, flags: int, opened: contextlib.ExitStack, folder: int | None = None
) -> int:
    """A descriptor that `opened` closes. Raises OSError."""
    handle = os.open(path, flags, 0o600, dir_fd=folder)
    opened.callback(os.close, handle)
    return handle


def _lock(folder: int, path: Path) -> None:
    """Lock the directory. Raises TierError if another process holds the lock. Does nothing on a
    file system without locks."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TierError(f"{path.name} is open in another minikv") from None
    except OSError:
        return


def _replace_manifest(folder: int, data: bytes) -> None:
    """Write a new manifest and rename it over the old one. Raises OSError; then the old one is
    unchanged."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _SAFE
    with os.fdopen(os.open(_NEXT, flags, 0o600, dir_fd=folder), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(_NEXT, _MANIFEST, src_dir_fd=folder, dst_dir_fd=folder)
    os.fsync(folder)


def _allocate(handle: int, at: int, size: int) -> None:
    """Reserve disk space for `size` bytes at the offset `at`, if the file system can; if not, a
    write may fail later. Raises OSError."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(handle, at, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise


def _transfer(
    call: Callable[[int, list[memoryview], int], int],
    handle: int,
    pieces: Sequence[memoryview],
    at: int,
) -> None:
    """Transfer all of `pieces` with `call`, which is `preadv` or `pwritev`. Raises OSError, for
    example if the file ends early."""
    for piece in pieces:
        left = piece
        while len(left):
            done = call(handle, [left], at)
            if not done:
                raise OSError(errno.EIO, "the file is shorter than it was")
            at, left = at + done, left[done:]


def _pieces(columns: Mapping[str, Tensor], one: Segment) -> list[memoryview]:
    """The bytes of a segment's rows, in the order of a part."""
    found = list[memoryview]()
    for column in columns.values():
        heads = column.view(torch.uint8).flatten(1).numpy()
        size = heads.shape[1] // column.shape[1]
        found += [head[one.begin * size : (one.begin + one.rows) * size].data for head in heads]
    return found


def _checksum(pieces: Sequence[memoryview]) -> int:
    found = 0
    for piece in pieces:
        found = zlib.crc32(piece, found)
    return found
