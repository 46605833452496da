"""The format of a tier's file.

Layout, in pages of 4 KiB, little-endian:

    page 0        the header: layers, heads, columns, and the identity of the model
    pages 1, 2    commit records, written in turn; the valid one with the higher number counts
    page 3 ...    segments, one for each prompt: its head, then one part for each layer

A head has the position of the segment's first row, a checksum of each part, and the token ids. A
part is [column][KV head][row], so that one `preadv` reads a layer's rows of a segment into their
places in [KV head][row] columns. Heads and parts begin at a page and are padded with zeros.

A prompt writes its parts, then its head, then a commit record. The parts and the head are on disk
before the record is written. Data after the last committed segment is ignored. When a conversation
becomes shorter, a commit record with fewer segments and rows is written before anything is
overwritten; then only the first rows of the last segment are used. A checksum covers every byte:
each head, record and part has its own.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from minikv.cache.tier_disk import Bytes, read
from minikv.cache.tier_rows import Columns, TierError

PAGE = 4096
FIRST = 3 * PAGE
"""Where segments begin."""

MAGIC = b"minikv tier 1\n"
TOP = struct.Struct(f"<{len(MAGIC)}sI")  # magic, bytes of JSON
RECORD = struct.Struct("<8sQQQI")  # mark, number, rows, segments, checksum of all heads
HEAD = struct.Struct("<8sQQI")  # mark, first row, rows, layers
COMMIT, SEGMENT = b"commit\n\0", b"segment\0"
_CHECK = struct.Struct("<I")
_MOST_ROWS = 1 << 31
_LARGEST = 1 << 20  # limit for layers, heads and numbers per row that a header may claim

_KINDS = {
    str(kind).removeprefix("torch."): kind
    for kind in (torch.float32, torch.bfloat16, torch.float16, torch.int8)
}


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The rows of one prompt. at: offset of its head, in bytes. begin: position of its first row.
    rows: how many it has. used: how many of the first ones the conversation still has. checks:
    checksums of the parts. ids: token ids of the rows."""

    at: int
    begin: int
    rows: int
    used: int
    checks: tuple[int, ...]
    ids: tuple[int, ...]
    chain: int  # checksum of this head and of all before it


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file. columns: dtype and size of one row of each, by name. identity: what the
    rows belong to; other modules write and compare it."""

    layers: int
    heads: int
    columns: Columns
    identity: Mapping[str, object]


@dataclass(frozen=True, slots=True, eq=False)
class Committed:
    """The committed content of a file. number: of the last commit record. recorded: the rows and
    segments that it counts. damage: what is damaged, or ""."""

    segments: list[Segment] = field(default_factory=list)
    number: int = 0
    recorded: tuple[int, int] = (0, 0)
    damage: str = ""


def committed(handle: int, header: Header) -> Committed:
    """Read the committed segments. Damaged ones are left out. Raises OSError."""
    found: list[tuple[int, int, int, int]] = []
    damage = ""
    for place in (PAGE, 2 * PAGE):
        page = read(handle, PAGE, place)
        if intact(page):
            mark, *record = RECORD.unpack_from(page)
            if mark == COMMIT:
                found.append(tuple(record))
                continue
        if page.strip(b"\0"):
            damage = "one of its commit records cannot be read"
    if not found:
        return Committed(damage=damage)
    number, rows, count, chain = max(found)
    if len(found) < 2 <= number:  # the record before this one must exist
        damage = "one of its commit records cannot be read"
    recorded, segments = (rows, count), list[Segment]()
    while len(segments) < count:
        segment = _segment(handle, header, segments[-1] if segments else None)
        if segment is None:
            break
        segments.append(segment)
    if len(segments) == count and segments and segments[-1].chain != chain:
        segments.pop()  # it is not the segment that the record counted
    if segments and len(segments) < count:
        rows = min(rows, segments[-1].begin + segments[-1].rows)
    ends = [*(segment.begin for segment in segments[1:]), rows]
    used = [
        replace(segment, used=end - segment.begin)
        for segment, end in zip(segments, ends, strict=False)
    ]
    if len(used) < count:
        damage = f"from token {rows_in(used):,} on it is damaged"
    return Committed(used, number, recorded, damage)


def _segment(handle: int, header: Header, last: Segment | None) -> Segment | None:
    """The segment after `last` (None: the first one); None if it is damaged. Raises OSError."""
    layers, at = header.layers, behind(header, last)
    size = os.fstat(handle).st_size
    if at + PAGE > size:
        return None
    mark, begin, rows, stated_layers = HEAD.unpack_from(read(handle, PAGE, at))
    if mark != SEGMENT or stated_layers != layers or not 0 < rows < _MOST_ROWS:
        return None
    length = head_size(rows, layers)
    if at + length + layers * part_size(header, rows) > size:
        return None
    head = read(handle, length, at)
    first = 0 if last is None else last.begin + 1
    most = 0 if last is None else last.begin + last.rows
    if not intact(head) or not first <= begin <= most:
        return None
    checks = np.frombuffer(head, "<u4", layers, HEAD.size)
    ids = np.frombuffer(head, "<i4", rows, HEAD.size + 4 * layers)
    chain = zlib.crc32(head, last.chain if last else 0)
    return Segment(at, begin, rows, rows, tuple(checks.tolist()), tuple(ids.tolist()), chain)


def commit_page(number: int, segments: Sequence[Segment]) -> bytes:
    """The page of a commit record for these segments."""
    chain = segments[-1].chain if segments else 0
    return sealed(RECORD.pack(COMMIT, number, rows_in(segments), len(segments), chain), PAGE)


def rows_in(segments: Sequence[Segment]) -> int:
    """How many rows of these segments the conversation still has."""
    return segments[-1].begin + segments[-1].used if segments else 0


def behind(header: Header, last: Segment | None) -> int:
    """The offset in bytes at which the segment after `last` begins (None: the first segment)."""
    if last is None:
        return FIRST
    return last.at + segment_size(header, last.rows)


def segment_size(header: Header, rows: int) -> int:
    """Bytes of a segment of `rows` rows."""
    return head_size(rows, header.layers) + header.layers * part_size(header, rows)


def part_size(header: Header, rows: int) -> int:
    """Bytes of a layer's part of a segment of `rows` rows."""
    return _pages(rows * header.heads * sum(width_of(*kind) for kind in header.columns.values()))


def part_at(header: Header, at: int, rows: int, layer: int) -> int:
    """The offset in bytes of a layer's part of the segment at `at`, which has `rows` rows."""
    return at + head_size(rows, header.layers) + layer * part_size(header, rows)


def read_header(handle: int, path: Path) -> Header:
    """Read page 0. Raises TierError if it is not a valid header, and OSError if it cannot be
    read."""
    page = read(handle, PAGE, 0)
    magic, length = TOP.unpack_from(page)
    if magic != MAGIC or not intact(page):
        raise TierError(f"{path.name} is damaged at its beginning, or of another version")
    try:
        made = json.loads(page[TOP.size : TOP.size + length])
        columns = {
            name: (_KINDS[kind], tuple(size)) for name, (kind, size) in made["columns"].items()
        }
        sizes = [made["layers"], made["heads"], *(n for _, size in columns.values() for n in size)]
        if not columns or not all(type(n) is int and 0 < n < _LARGEST for n in sizes):
            raise ValueError(sizes)
        return Header(made["layers"], made["heads"], columns, made["identity"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise TierError(f"{path.name} does not say what it is") from None


def top_page(header: Header) -> bytes:
    """The bytes of page 0."""
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
    assert len(text) <= PAGE - TOP.size - _CHECK.size
    return sealed(TOP.pack(MAGIC, len(text)) + text, PAGE)


def head_pages(begin: int, checks: Sequence[int], ids: Sequence[int]) -> bytes:
    """The bytes of a segment's head, padded to whole pages."""
    text = HEAD.pack(SEGMENT, begin, len(ids), len(checks))
    text += np.array(checks, "<u4").tobytes() + np.array(ids, "<i4").tobytes()
    return sealed(text, head_size(len(ids), len(checks)))


def head_size(rows: int, layers: int) -> int:
    """Bytes of the head of a segment of `rows` rows, a multiple of a page."""
    return _pages(HEAD.size + 4 * layers + 4 * rows + _CHECK.size)


def sealed(text: bytes, size: int) -> bytes:
    """`text` padded with zeros to `size` bytes, of which the last four are a checksum of the
    others."""
    text += bytes(size - _CHECK.size - len(text))
    return text + _CHECK.pack(zlib.crc32(text))


def intact(page: bytes) -> bool:
    """Whether the checksum at the end is that of all before it."""
    found: int = _CHECK.unpack_from(page, len(page) - _CHECK.size)[0]
    return found == zlib.crc32(memoryview(page)[: -_CHECK.size])


def checksum(pieces: Sequence[Bytes]) -> int:
    """A CRC of sums of 512 64-bit words each; the sums run at the speed of memory. It detects any
    change of a single word, and other changes except for about one in 2**32."""
    found = 0
    for piece in pieces:
        whole = len(piece) // PAGE * PAGE
        if whole:
            words = piece[:whole].view(np.uint64).reshape(-1, PAGE // 8)
            found = zlib.crc32(words.sum(1, dtype=np.uint64).tobytes(), found)
        found = zlib.crc32(piece[whole:].tobytes(), found)
    return found


def width_of(dtype: torch.dtype, size: tuple[int, ...]) -> int:
    """Bytes of one row of a column."""
    return dtype.itemsize * (size[0] if size else 1)


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
