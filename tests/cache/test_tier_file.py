"""A tier in a file gives what a tier in RAM gives, bit for bit, and finds every damaged byte."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import small
import torch
from torch import Tensor

from minikv.cache import tier_file, tier_format
from minikv.cache.stats import Shape
from minikv.cache.tier import Tier
from minikv.cache.tier_file import FileRows, header_of, is_open
from minikv.cache.tier_format import PAGE
from minikv.cache.tier_rows import Columns, RamRows, Rows, TierError, columns_of, copy_rows
from minikv.engine.engine import Engine

LAYERS, HEADS = 3, 2
COLUMNS: Columns = {"k": (torch.float32, (8,)), "v": (torch.float32, (8,))}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tier.kv"


@pytest.fixture
def rows(path: Path) -> Iterator[FileRows]:
    made = FileRows.create(path, LAYERS, HEADS, COLUMNS, {"model": "x"})
    yield made
    made.close()


def column(layer: int, name: str, begin: int, end: int, seed: int = 0) -> Tensor:
    """What a test writes: every number is another one."""
    wide = (
        torch.arange(begin, end).float()[None, :, None] + torch.arange(HEADS)[:, None, None] * 1e4
    )
    return wide + layer * 1e5 + torch.arange(8) / 16 + (0.5 if name == "v" else 0) + seed * 1e6


def add(rows: Rows, have: int, end: int, seed: int = 0, then: Callable[[], object] = int) -> None:
    """A prompt, as a cache reads it."""
    rows.reserve(end, have)
    for layer in range(LAYERS):
        place = rows.read(layer, end)
        new = {}
        for name in COLUMNS:
            place[name][:, have:] = column(layer, name, have, end, seed)
            new[name] = place[name][:, have:]
        rows.write(layer, have, new)
    rows.commit(end, [seed * 1000 + i for i in range(end)])
    rows.drop()
    then()


def expect(rows: Rows, *parts: tuple[int, int, int]) -> None:
    """The rows are those of these (begin, end, seed)."""
    for layer in range(LAYERS):
        for name, found in rows.read(layer, parts[-1][1]).items():
            want = [column(layer, name, *part) for part in parts]
            assert torch.equal(found, torch.cat(want, 1))
    rows.drop()


def again(rows: FileRows, path: Path) -> FileRows:
    rows.close()
    return FileRows.open(path)


def test_rows_come_back_in_this_process_and_in_the_next(rows: FileRows, path: Path) -> None:
    add(rows, 0, 100)
    add(rows, 100, 130)
    add(rows, 130, 131)
    expect(rows, (0, 131, 0))
    rows.close()
    found = FileRows.open(path)
    assert (found.rows, found.damage, found.ids) == (131, "", list(range(131)))
    assert (found.header.layers, found.header.columns) == (LAYERS, COLUMNS)
    assert header_of(path).identity == {"model": "x"}
    expect(found, (0, 131, 0))
    add(found, 131, 140)
    expect(found, (0, 140, 0))
    found.close()


def test_a_file_is_the_users_alone_in_whole_pages(rows: FileRows, path: Path) -> None:
    add(rows, 0, 100)
    rows.sync()
    facts = path.stat()
    assert stat.S_IMODE(facts.st_mode) == 0o600
    assert facts.st_size == rows.nbytes
    # three pages, a head, and for each layer the rows of a part, in whole pages
    part = -(-100 * HEADS * 2 * 32 // PAGE) * PAGE
    assert rows.nbytes == 4 * PAGE + LAYERS * part
    assert rows.working == 0


@pytest.mark.parametrize("target", ["file", "nowhere"])
def test_links_are_not_followed(tmp_path: Path, target: str) -> None:
    (tmp_path / "file").write_bytes(b"precious")
    link = tmp_path / "tier.kv"
    link.symlink_to(tmp_path / target)
    for use in (
        lambda: FileRows.create(link, LAYERS, HEADS, COLUMNS),
        lambda: FileRows.open(link),
        lambda: header_of(link),
    ):
        with pytest.raises(TierError):
            use()
    assert (tmp_path / "file").read_bytes() == b"precious"
    assert not (tmp_path / "nowhere").exists()


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "gone", "."):
        with pytest.raises(TierError):
            FileRows.open(tmp_path / name)


def test_rows_behind_the_last_commit_are_ignored(rows: FileRows, path: Path) -> None:
    add(rows, 0, 40)
    rows.reserve(90, 40)
    for layer in range(LAYERS):
        new = {name: column(layer, name, 40, 90) for name in COLUMNS}
        rows.write(layer, 40, new)
    rows.drop()
    assert rows.rows == 40
    found = again(rows, path)
    assert (found.rows, found.damage) == (40, "")
    expect(found, (0, 40, 0))
    add(found, 40, 60, 2)
    expect(found, (0, 40, 0), (40, 60, 2))
    found.close()


@pytest.mark.parametrize("at", [0, 1, 59, 60, 61, 100])
def test_a_shorter_conversation_is_recorded_before_its_rows_are_overwritten(
    rows: FileRows, path: Path, at: int
) -> None:
    add(rows, 0, 60)
    add(rows, 60, 101)
    rows.reserve(at + 9, at)
    rows.drop()
    found = again(rows, path)  # as after a crash at this point
    assert (found.rows, found.damage) == (at, "")
    add(found, at, at + 30, 3)
    add(found, at + 30, at + 35, 3)
    found = again(found, path)
    assert (found.rows, found.damage) == (at + 35, "")
    assert found.ids == [*range(at), *(3000 + i for i in range(at, at + 35))]
    expect(found, *([(0, at, 0)] if at else []), (at, at + 35, 3))
    found.close()


def test_one_layer_at_a_time_is_in_memory(rows: FileRows) -> None:
    add(rows, 0, 1000)
    rows.reserve(1010, 1000)
    most = 0
    for layer in range(LAYERS):
        rows.read(layer, 1010)
        most = max(most, rows.working)
    assert most == 2 * 1010 * HEADS * 2 * 32
    rows.drop()
    assert rows.working == 0


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("windows", [None, (None, 40)])
def test_a_file_gives_what_ram_gives_bit_for_bit(
    path: Path, coded: bool, staged: bool, windows: tuple[int | None, ...] | None
) -> None:
    """Over turns, an undo, and a process that ended."""
    net = small.network(layers=2, windows=windows)
    ram, disk = (small.engine(net, "adakv", "roco", 60) for _ in range(2))
    shape: Shape = ram.kv.shape
    columns = columns_of(shape, net.dtype, coded)
    made = FileRows.create(path, shape.layers, shape.kv_heads, columns)

    def tier(run: Engine, kept: Rows | None) -> Tier:
        run.kv.tier = Tier(shape, net.dtype, run.kv.device, coded=coded, rows=kept)
        if staged:
            run.kv.tier._direct = False
        return run.kv.tier

    one, two = tier(ram, None), tier(disk, made)
    ids = small.ids(150)
    for turn in range(5):
        if turn == 2:
            ids = ids[:120] + small.ids(50, seed=77)
            one.truncate(120)
            two.truncate(120)
        if turn == 4:
            made.close()
            made = FileRows.open(path)
            two = tier(disk, made)
            two.length = made.rows
        assert torch.equal(ram.recall(ids), disk.recall(ids))
        for token in small.ids(5, seed=turn):
            assert torch.equal(ram.step(token), disk.step(token))
        assert one.length == two.length == len(ids)
        for layer in range(shape.layers):
            for name, kept in made.read(layer, len(ids)).items():
                assert torch.equal(kept, one.rows.read(layer, len(ids))[name])
        made.drop()
        ids += small.ids(5, seed=turn) + small.ids(9, seed=50 + turn)
    made.close()


def test_a_file_goes_to_ram_and_back(rows: FileRows, tmp_path: Path) -> None:
    add(rows, 0, 50)
    add(rows, 50, 70)
    ram = RamRows(LAYERS, HEADS, COLUMNS, 4096)
    copy_rows(rows, ram, LAYERS, 70)
    other = FileRows.create(tmp_path / "copy", LAYERS, HEADS, COLUMNS)
    copy_rows(ram, other, LAYERS, 70, range(70))
    other = again(other, tmp_path / "copy")
    expect(other, (0, 70, 0))
    assert other.ids == list(range(70))
    other.close()


# -- damage -----------------------------------------------------------------------------------


def found_of(path: Path) -> tuple[int, str]:
    """Rows that a file gives, and what was found wrong, when it is opened or read."""
    try:
        rows = FileRows.open(path)
    except TierError as error:
        return 0, str(error)
    count, wrong = rows.rows, rows.damage
    try:
        for layer in range(LAYERS if count else 0):
            rows.read(layer, count)
    except TierError as error:
        count, wrong = error.rows or 0, wrong or str(error)
    rows.reserve(count, count)
    for layer in range(LAYERS):  # what is said to be good is good
        for name, kept in rows.read(layer, count).items():
            assert torch.equal(kept, column(layer, name, 0, count))
    assert rows.ids == list(range(count))
    rows.close()
    return count, wrong


def test_every_altered_byte_is_found(rows: FileRows, path: Path, part: float) -> None:
    add(rows, 0, 20)
    add(rows, 20, 31)
    rows.close()
    data = path.read_bytes()
    draw = random.Random(5)
    every = range(len(data))
    places = every if part == 1.0 else sorted(draw.sample(every, 400))
    second = len(data) - (len(data) - 3 * PAGE) // 2
    for at in places:
        altered = bytearray(data)
        altered[at] ^= 1 << draw.randrange(8)
        path.write_bytes(altered)
        count, wrong = found_of(path)
        assert wrong, at
        assert count in (0, 20, 31)
        if at >= second:
            assert count == 20, at
    path.write_bytes(data)
    assert found_of(path) == (31, "")


@pytest.mark.parametrize("how", ["zeros", "cut", "random"])
def test_a_torn_file_is_found(rows: FileRows, path: Path, how: str) -> None:
    """Any page lost, overwritten, or the file cut there."""
    add(rows, 0, 20)
    add(rows, 20, 31)
    rows.close()
    data = path.read_bytes()
    for at in range(0, len(data), PAGE):
        altered = bytearray(data)
        if how == "cut":
            del altered[at:]
        else:
            altered[at : at + PAGE] = bytes(PAGE) if how == "zeros" else os.urandom(PAGE)
        path.write_bytes(altered)
        count, wrong = found_of(path)
        # Of two commits, the second one's record may as well never have been written.
        assert wrong or count < 31, at
        path.unlink()


def test_a_damaged_part_is_written_again_from_there_on(rows: FileRows, path: Path) -> None:
    add(rows, 0, 20)
    add(rows, 20, 31)
    rows.close()
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1
    path.write_bytes(data)
    found = FileRows.open(path)
    with pytest.raises(TierError, match="damaged from token 20 on") as error:
        expect(found, (0, 31, 0))
    assert error.value.rows == 20
    add(found, 20, 40)
    expect(found, (0, 40, 0))
    found.close()
    assert found_of(path) == (40, "")


# -- writing ----------------------------------------------------------------------------------


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_known_before_anything_is_read(
    rows: FileRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(rows, 0, 20)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(TierError, match="No space left"):
            rows.reserve(40, 20)
    expect(rows, (0, 20, 0))
    add(rows, 20, 40)
    expect(rows, (0, 40, 0))


def test_a_disk_that_cannot_keep_room_is_asked_for_it(
    rows: FileRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    add(rows, 0, 20)
    facts = os.statvfs("/")
    monkeypatch.setattr(
        os, "fstatvfs", lambda handle: type("", (), {"f_bavail": 0, "f_frsize": facts.f_frsize})
    )
    with pytest.raises(TierError, match="No space left"):
        rows.reserve(40, 20)


@pytest.mark.parametrize("name", ["pwritev", "fdatasync"])
def test_a_write_that_fails_is_said_and_costs_only_its_own_rows(
    rows: FileRows, path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(rows, 0, 20)
    rows.sync()
    with monkeypatch.context() as patch:
        patch.setattr(os, name, full)
        with pytest.raises(TierError, match="No space left"):
            add(rows, 20, 40, then=rows.sync)
    rows.close()
    assert found_of(path) == (20, "")


def test_a_file_without_a_name_is_not_brought_to_the_disk(
    rows: FileRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is gone with the process, so nobody waits for the disk."""
    monkeypatch.setattr(os, "fdatasync", full)
    rows.unlink()
    add(rows, 0, 20, then=rows.sync)
    add(rows, 10, 30, 1, then=rows.sync)
    expect(rows, (0, 10, 0), (10, 30, 1))


def test_a_tier_that_cannot_be_written_does_not_cost_the_turn(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = small.network(layers=2)
    run, plain = (small.engine(net, "adakv", "roco", 60) for _ in range(2))
    shape = run.kv.shape
    rows = FileRows.create(path, 2, shape.kv_heads, columns_of(shape, net.dtype, False))
    run.kv.tier = Tier(shape, net.dtype, run.kv.device, rows=rows)
    real = os.pwritev

    def fails_later(handle: int, pieces: list[memoryview], at: int) -> int:
        return real(handle, pieces, at) if at < 3 * PAGE else full()  # type: ignore[func-returns-value]

    monkeypatch.setattr(os, "pwritev", fails_later)
    ids = small.ids(150)
    assert torch.equal(run.recall(ids), plain.prompt(ids))
    assert "No space left" in str(run.kv.tier.failed)
    assert run.kv.tier.length == 0
    assert torch.equal(run.step(3), plain.step(3))
    rows.close()


def test_a_file_is_open_in_one_place(rows: FileRows, path: Path) -> None:
    assert is_open(path)
    with pytest.raises(TierError, match="is open in another minikv"):
        FileRows.open(path)
    code = (
        "import sys; from pathlib import Path; from minikv.cache.tier_file import FileRows\n"
        "try: FileRows.open(Path(sys.argv[1]))\n"
        "except Exception as error: print(error)"
    )
    assert "is open in another minikv" in forked.run(str(path), code=code).out
    rows.close()
    assert not is_open(path)
    FileRows.open(path).close()


def test_a_file_without_a_name_is_gone_when_it_is_closed(rows: FileRows, path: Path) -> None:
    rows.unlink()
    add(rows, 0, 20)
    assert list(path.parent.iterdir()) == []
    expect(rows, (0, 20, 0))


def test_a_file_that_was_forgotten_is_closed(path: Path) -> None:
    """A chat that nobody closed frees its file's descriptor, lock and disk space."""
    made = FileRows.create(path, LAYERS, HEADS, COLUMNS)
    add(made, 0, 9)
    handle = made._handle
    del made
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)
    found = FileRows.open(path)  # it is not locked
    expect(found, (0, 9, 0))
    found.close()


def test_a_closed_descriptor_is_not_closed_again(path: Path) -> None:
    """Its number may be another file's by then."""
    made = FileRows.create(path, LAYERS, HEADS, COLUMNS)
    made.close()
    other = os.open(path, os.O_RDONLY)
    del made
    gc.collect()
    os.fstat(other)
    os.close(other)


def test_large_parts_take_several_calls(rows: FileRows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems move at most 2 GiB at once, and some fewer bytes than were asked for."""

    def short(real: Callable[..., int]) -> Callable[..., int]:
        return lambda handle, pieces, at: real(handle, [memoryview(pieces[0])[:1000]], at)

    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, short(getattr(os, name)))
    add(rows, 0, 70)
    add(rows, 70, 90)
    expect(rows, (0, 90, 0))


# -- a file's life --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "told"),
    [(OSError(errno.ENOSPC, "No space left on device"), TierError), (KeyboardInterrupt(), None)],
)
def test_a_file_that_cannot_be_begun_is_not_there(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, told: type | None
) -> None:
    def fail(*given: object) -> int:
        raise error

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(told or KeyboardInterrupt):
        FileRows.create(path, LAYERS, HEADS, COLUMNS)
    assert not path.exists()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_nobody_wants_is_gone_when_it_is_closed(rows: FileRows, path: Path) -> None:
    add(rows, 0, 20)
    rows.kept = False
    rows.close()
    assert not path.exists()
    rows.close()  # once more changes nothing
    path.write_text("another file")
    rows.unlink()
    assert path.exists()  # its name is another's by now


def test_a_file_moves_on_its_own_disk_alone(
    rows: FileRows, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(rows, 0, 20)
    rows.kept = False
    real = os.replace

    def failing(code: int) -> Callable[..., None]:
        def fail(*given: object) -> None:
            raise OSError(code, os.strerror(code))

        return fail

    monkeypatch.setattr(os, "replace", failing(errno.EXDEV))
    assert not rows.move(tmp_path / "there.kv")
    monkeypatch.setattr(os, "replace", failing(errno.EACCES))
    with pytest.raises(OSError, match=os.strerror(errno.EACCES)):
        rows.move(tmp_path / "there.kv")
    assert (rows.path, rows.kept) == (path, False)
    monkeypatch.setattr(os, "replace", real)
    assert rows.move(tmp_path / "there.kv")
    assert (rows.path, rows.kept) == (tmp_path / "there.kv", True)
    expect(rows, (0, 20, 0))
    rows.unlink()
    assert not rows.move(path)  # without a name there is nothing to move


def test_a_file_knows_whether_it_is_at_a_place(rows: FileRows, path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.kv"
    assert rows.is_at(path)
    assert not rows.is_at(other)
    other.write_text("x")
    assert not rows.is_at(other)
    assert rows.path == path
    path.rename(other)
    assert not rows.is_at(path)
    assert rows.is_at(other)
    assert rows.path == other


def test_the_last_two_commits_are_on_two_pages(rows: FileRows, path: Path) -> None:
    """A commit that is torn leaves the one before it."""
    found = set()
    before = path.read_bytes()[: 3 * PAGE]
    for end in (20, 40, 60):
        add(rows, end - 20, end)
        after = path.read_bytes()[: 3 * PAGE]
        changed = {n for n in (1, 2) if after[n * PAGE :][:PAGE] != before[n * PAGE :][:PAGE]}
        assert len(changed) == 1
        assert not changed & found
        before, found = after, changed
    rows.reserve(50, 30)  # a shorter conversation is recorded, too
    after = path.read_bytes()[: 3 * PAGE]
    (last,) = found
    assert after[last * PAGE :][:PAGE] == before[last * PAGE :][:PAGE]
    assert after != before


def test_nothing_new_is_nothing_to_write(rows: FileRows, path: Path) -> None:
    """A prompt of which the file has all rows, and one that it had before."""
    add(rows, 0, 20)
    size, number = path.stat().st_size, rows._number
    rows.reserve(20, 20)
    for layer in range(LAYERS):
        rows.write(layer, 20, {name: rows.read(layer, 20)[name][:, 20:] for name in COLUMNS})
    rows.commit(20)
    rows.drop()
    assert (path.stat().st_size, rows._number) == (size, number)
    expect(rows, (0, 20, 0))


def test_a_cleared_file_has_no_rows_and_gives_its_room_back(rows: FileRows, path: Path) -> None:
    add(rows, 0, 200)
    assert rows.nbytes > 3 * PAGE
    rows.clear()
    assert (rows.rows, rows.ids, rows.nbytes) == (0, [], 3 * PAGE)
    assert path.stat().st_size == 3 * PAGE
    add(rows, 0, 20, seed=1)
    rows = again(rows, path)
    assert rows.damage == ""
    expect(rows, (0, 20, 1))
    rows.close()


def test_a_read_that_the_disk_refuses_names_the_first_token(
    rows: FileRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(rows, 0, 20)
    add(rows, 20, 30)
    real, calls = os.preadv, []

    def fail(handle: int, pieces: list[memoryview], at: int) -> int:
        calls.append(at)
        if len(calls) == 2:  # the first layer's second segment
            raise OSError(errno.EIO, "Input/output error")
        return real(handle, pieces, at)

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(TierError, match="Input/output error") as refused:
        rows.read(0, 30)
    assert refused.value.rows == 20
    rows.drop()
    monkeypatch.setattr(os, "preadv", real)
    expect(rows, (0, 20, 0), (20, 30, 0))


# -- what others wrote ----------------------------------------------------------------------------


def put(path: Path, at: int, page: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(page)


def test_a_record_with_another_mark_is_none(rows: FileRows, path: Path) -> None:
    """Its checksum fits, and it is no commit record; the other one counts."""
    add(rows, 0, 20)
    add(rows, 20, 30)
    rows.close()
    page = tier_format.sealed(tier_format.RECORD.pack(b"other\n\0\0", 9, 30, 2, 0), PAGE)
    put(path, PAGE * (1 + rows._number % 2), page)
    found = FileRows.open(path)
    assert found.damage == "one of its commit records cannot be read"
    assert found.rows == 20
    found.close()


def test_a_segment_of_another_record_is_left_out(rows: FileRows, path: Path) -> None:
    """Whole in itself, but not the one that the record was written for."""
    add(rows, 0, 20)
    add(rows, 20, 30)
    rows.close()
    record = tier_format.RECORD.pack(tier_format.COMMIT, rows._number, 30, 2, 12345)
    put(path, PAGE * (1 + rows._number % 2), tier_format.sealed(record, PAGE))
    found = FileRows.open(path)
    assert found.rows == 20
    assert found.damage == "from token 20 on it is damaged"
    found.close()


HEADERS: list[object] = [
    {"layers": 3, "heads": 2, "columns": {}, "identity": {}},
    {"layers": 0, "heads": 2, "columns": {"k": ["float32", [8]]}, "identity": {}},
    {"layers": 3, "heads": True, "columns": {"k": ["float32", [8]]}, "identity": {}},
    {"layers": 3, "heads": 2, "columns": {"k": ["float32", [1 << 20]]}, "identity": {}},
    {"layers": 3, "heads": 2, "columns": {"k": ["float64", [8]]}, "identity": {}},
    {"layers": 3, "heads": 2, "columns": {"k": ["float32", [8]]}},
    {"layers": 3, "heads": 2, "columns": [], "identity": {}},
    [],
]


@pytest.mark.parametrize("says", HEADERS)
def test_a_first_page_that_says_what_cannot_be_is_refused(
    rows: FileRows, path: Path, says: object
) -> None:
    rows.close()
    text = json.dumps(says).encode()
    put(
        path, 0, tier_format.sealed(tier_format.TOP.pack(tier_format.MAGIC, len(text)) + text, PAGE)
    )
    for read in (header_of, FileRows.open):
        with pytest.raises(TierError, match=r"tier.kv does not say what it is"):
            read(path)


def test_a_header_that_the_disk_does_not_give_is_one_line(
    rows: FileRows, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(TierError, match=r"tier.kv: Input/output error"):
        header_of(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_where_locks_do_not_work_nobody_is_asked(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(tier_file.fcntl, "flock", fail)
    made = FileRows.create(path, LAYERS, HEADS, COLUMNS)
    add(made, 0, 20)
    made = again(made, path)
    expect(made, (0, 20, 0))
    made.close()


def test_a_system_that_cannot_keep_room_is_asked_what_is_free(
    rows: FileRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    add(rows, 0, 20)
    expect(rows, (0, 20, 0))
    with pytest.raises(TierError, match=os.strerror(errno.ENOSPC)):
        rows.reserve(1 << 30, 20)


def test_asking_whether_a_file_is_open_leaves_it_closed(path: Path) -> None:
    """Nobody's lock and no descriptor is left, whatever the answer was."""
    FileRows.create(path, LAYERS, HEADS, COLUMNS).close()
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert not is_open(path)
    header_of(path)
    made = FileRows.open(path)
    assert is_open(path)
    made.close()
    assert not is_open(path)
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("mark", "first", "count", "layers"),
    [
        (b"commit\n\0", 20, 10, LAYERS),
        (b"segment\0", 20, 10, LAYERS + 1),
        (b"segment\0", 20, 10, LAYERS - 1),
        (b"segment\0", 20, 0, LAYERS),
        (b"segment\0", 20, 1 << 31, LAYERS),
        (b"segment\0", 21, 10, LAYERS),
        (b"segment\0", 0, 10, LAYERS),
    ],
)
def test_a_forged_segment_is_damage(
    mark: bytes, first: int, count: int, layers: int, rows: FileRows, path: Path
) -> None:
    """Its checksum fits, but it is no segment of this file: what is before it is kept."""
    add(rows, 0, 20)
    at = rows.nbytes
    add(rows, 20, 30)
    size = rows.nbytes - at - LAYERS * tier_format.part_size(rows.header, 10)
    rows.close()
    text = tier_format.HEAD.pack(mark, first, count, layers) + bytes(4 * LAYERS + 4 * 10)
    put(path, at, tier_format.sealed(text, size))
    found = FileRows.open(path)
    assert found.rows == 20
    assert found.damage == "from token 20 on it is damaged"
    found.close()


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_regular_file_is_not_held_open(kind: str, path: Path) -> None:
    os.mkdir(path) if kind == "folder" else os.mkfifo(path)
    before = sorted(os.listdir("/proc/self/fd"))
    for read in (header_of, FileRows.open):
        with pytest.raises(TierError):
            read(path)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_parts_are_filled_up_with_zeros(rows: FileRows, path: Path) -> None:
    add(rows, 0, 100)
    rows.sync()
    data, size = path.read_bytes(), 100 * HEADS * 2 * 32
    part = -(-size // PAGE) * PAGE
    for layer in range(LAYERS):
        begin = 4 * PAGE + layer * part
        assert data[begin : begin + size].strip(b"\0")
        assert data[begin + size : begin + part] == bytes(part - size)


def test_every_layer_is_read_once_and_the_next_one_while_this_one_is_computed(
    rows: FileRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(rows, 0, 100)
    loaded: list[int] = []
    load = FileRows._load

    def listen(self: FileRows, layer: int, buffer: Any) -> None:
        loaded.append(layer)
        load(self, layer, buffer)

    monkeypatch.setattr(FileRows, "_load", listen)
    rows.reserve(120, 100)
    for layer in range(LAYERS):
        rows.read(layer, 120)
        rows._wait()
        assert loaded == [*range(min(layer + 2, LAYERS))]
