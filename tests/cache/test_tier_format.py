"""The bytes of a tier's file: what is written is found, and no byte of it may change."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest
import torch

from minikv.cache.tier_format import (
    FIRST,
    PAGE,
    Header,
    Segment,
    behind,
    checksum,
    commit_page,
    committed,
    head_pages,
    head_size,
    part_at,
    part_size,
    read_header,
    segment_size,
    top_page,
)
from minikv.cache.tier_rows import TierError

HEADER = Header(3, 2, {"k": (torch.float32, (8,)), "pos": (torch.int8, ())}, {"model": "x"})


def test_the_checksum_sees_words_pages_and_their_order() -> None:
    draw = torch.Generator().manual_seed(1)
    data = torch.randint(256, (3 * PAGE + 100,), generator=draw, dtype=torch.uint8).numpy()
    found = {checksum([data])}
    for other in (data.copy() for _ in range(4)):
        case = len(found)
        if case == 1:
            other[:PAGE], other[PAGE : 2 * PAGE] = data[PAGE : 2 * PAGE], data[:PAGE]
        elif case == 2:
            other[-1] ^= 1
        elif case == 3:
            other[512:1024] = 0
        else:
            other[PAGE + 7] ^= 128
        found.add(checksum([other]))
    assert len(found) == 5


def test_a_head_has_room_for_the_checksums_of_many_layers() -> None:
    """4 bytes for each layer and each row: one page holds 1,000 together, two hold more."""
    assert len(head_pages(0, [1] * 997, [2] * 3)) == PAGE
    assert len(head_pages(0, [1] * 1100, [2] * 3)) == 2 * PAGE
    assert len(head_pages(0, [1] * 3, [2] * 1100)) == 2 * PAGE


def segments(*ends: int) -> list[Segment]:
    """One after the other, with all their rows."""
    made: list[Segment] = []
    for begin, end in zip((0, *ends), ends, strict=False):
        ids = tuple(range(begin, end))
        head, before = head_pages(begin, (7, 8, 9), ids), made[-1].chain if made else 0
        at = behind(HEADER, made[-1] if made else None)
        count = end - begin
        made.append(Segment(at, begin, count, count, (7, 8, 9), ids, zlib.crc32(head, before)))
    return made


def test_what_is_written_is_found(tmp_path: Path) -> None:
    """The header, the last of two commit records, and the segments that it counts."""
    made, path = segments(20, 1500), tmp_path / "tier.kv"
    with path.open("wb") as file:
        file.write(top_page(HEADER))
        file.write(commit_page(2, made) + commit_page(1, made[:1]))
        for one in made:
            file.seek(one.at)
            head = head_pages(one.begin, one.checks, one.ids)
            file.write(head + bytes(segment_size(HEADER, one.rows) - len(head)))
    handle = os.open(path, os.O_RDONLY)
    try:
        assert read_header(handle, path) == HEADER
        found = committed(handle, HEADER)
    finally:
        os.close(handle)
    assert (found.number, found.recorded, found.damage) == (2, (1500, 2), "")
    for one, other in zip(found.segments, made, strict=True):
        assert [getattr(one, name) for name in one.__slots__] == [
            getattr(other, name) for name in one.__slots__
        ]


def test_an_empty_first_page_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tier.kv"
    path.write_bytes(bytes(3 * PAGE))
    with path.open("rb") as file, pytest.raises(TierError, match="damaged at its beginning"):
        read_header(file.fileno(), path)


def test_parts_are_whole_pages_behind_their_head() -> None:
    """20 rows of 2 heads: 33 bytes each, so that a part is one page; of 1,500 it is 25."""
    assert [part_size(HEADER, rows) for rows in (20, 1500)] == [PAGE, 25 * PAGE]
    first, second = segments(20, 1500)
    assert first.at == FIRST == 3 * PAGE
    assert second.at == FIRST + PAGE + 3 * PAGE
    assert part_at(HEADER, second.at, 1480, 2) == second.at + 2 * PAGE + 2 * 24 * PAGE


def test_heads_and_parts_take_whole_pages() -> None:
    """A head: 28 bytes, 4 for each layer and each row, and a checksum of 4. A part: of each head a
    row of 8 float32 and a byte."""
    fits = (PAGE - 28 - 4) // 4
    assert (head_size(fits - 3, 3), head_size(fits - 2, 3)) == (PAGE, 2 * PAGE)
    assert (head_size(1, fits - 1), head_size(1, fits)) == (PAGE, 2 * PAGE)
    rows = PAGE // (2 * 33)
    assert (part_size(HEADER, 1), part_size(HEADER, rows)) == (PAGE, PAGE)
    assert part_size(HEADER, rows + 1) == 2 * PAGE
