"""A tier in a file gives what a tier in RAM gives, bit for bit, and finds every damaged byte."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import forked
import pytest
import small
import torch
from tiers import Runtime
from torch import Tensor

from minikv.cache import tier_file
from minikv.cache.stats import Shape
from minikv.cache.tier import Tier
from minikv.cache.tier_file import FileRows, header_of, is_open
from minikv.cache.tier_rows import Columns, Pinned, RamRows, Rows, TierError, columns_of, copy_rows
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


def test_a_tier_is_the_users_alone(rows: FileRows, path: Path) -> None:
    add(rows, 0, 100)
    rows.sync()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}
    assert sorted(file.name for file in path.iterdir()) == ["manifest", "rows"]
    # an id for each row, and for each layer the rows of a part
    assert rows.nbytes == (path / "rows").stat().st_size == 100 * (4 + LAYERS * HEADS * 2 * 32)
    assert rows.working == 0


def opened() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("what", ["gone", "pipe", "file", "link", "manifest", "rows", "empty"])
def test_what_is_no_tier_is_refused_and_left_alone(path: Path, tmp_path: Path, what: str) -> None:
    """Links are not followed, nothing that is no file is read, and nothing stays open."""
    FileRows.create(tmp_path / "other", LAYERS, HEADS, COLUMNS).close()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "file":
        path.write_bytes(b"minikv tier 1\n" + bytes(4096))
    elif what == "link":
        path.symlink_to(tmp_path / "other")
    elif what != "gone":
        FileRows.create(path, LAYERS, HEADS, COLUMNS).close()
        for name in ("manifest", "rows") if what == "empty" else (what,):
            (path / name).unlink()
    if what == "manifest":
        (path / what).symlink_to(tmp_path / "other" / what)
    elif what == "rows":
        os.mkfifo(path / what)
    before = opened()
    for use in (FileRows.open, *((header_of,) if what != "rows" else ())):
        with pytest.raises(TierError) as error:
            use(path)
        if what == "file":
            assert str(error.value) == (
                "tier.kv is of an earlier version of minikv; the documents are read again"
            )
    if what not in ("gone",):
        with pytest.raises(TierError):
            FileRows.create(path, LAYERS, HEADS, COLUMNS)
        assert os.path.lexists(path)
    assert opened() == before
    FileRows.open(tmp_path / "other").close()


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


def put(path: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        (path / name).write_bytes(data)


def test_every_altered_byte_is_found(rows: FileRows, path: Path, part: float) -> None:
    add(rows, 0, 20)
    add(rows, 20, 31)
    rows.close()
    draw = random.Random(5)
    whole = {name: (path / name).read_bytes() for name in ("manifest", "rows")}
    for name, data in whole.items():
        every = range(len(data))
        for at in every if part == 1.0 else draw.sample(every, min(300, len(data))):
            altered = bytearray(data)
            altered[at] ^= 1 << draw.randrange(8)
            put(path, whole | {name: altered})
            count, wrong = found_of(path)
            assert wrong, at
            first = at < len(data) * 20 // 31
            assert count == (0 if name == "manifest" or first else 20), at
    put(path, whole)
    assert found_of(path) == (31, "")


@pytest.mark.parametrize("how", ["zeros", "cut", "random"])
@pytest.mark.parametrize("name", ["manifest", "rows"])
def test_a_torn_file_is_found(rows: FileRows, path: Path, name: str, how: str) -> None:
    """Any block lost, overwritten, or the file cut there."""
    add(rows, 0, 20)
    add(rows, 20, 31)
    rows.close()
    whole = {one: (path / one).read_bytes() for one in ("manifest", "rows")}
    data = whole[name]
    for at in range(0, len(data), 512):
        altered = bytearray(data)
        if how == "cut":
            del altered[at:]
        else:
            altered[at : at + 512] = bytes(512) if how == "zeros" else os.urandom(512)
            del altered[len(data) :]
        put(path, whole | {name: altered})
        assert found_of(path)[1], at


def test_a_damaged_part_is_written_again_from_there_on(rows: FileRows, path: Path) -> None:
    add(rows, 0, 20)
    add(rows, 20, 31)
    rows.close()
    data = bytearray((path / "rows").read_bytes())
    data[-500] ^= 1
    (path / "rows").write_bytes(data)
    found = FileRows.open(path)
    with pytest.raises(TierError, match="damaged from token 20 on") as error:
        expect(found, (0, 31, 0))
    assert error.value.rows == 20
    add(found, 20, 40)
    expect(found, (0, 40, 0))
    found.close()
    assert found_of(path) == (40, "")


# -- writing ----------------------------------------------------------------------------------


def full(*_: object, **__: object) -> None:
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


@pytest.mark.parametrize("name", ["pwritev", "fdatasync", "fsync", "replace"])
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


def test_a_file_without_a_name_is_gone_with_the_process_and_is_not_brought_to_the_disk(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So nobody waits for the disk."""
    for name in ("fdatasync", "fsync", "replace"):
        monkeypatch.setattr(os, name, full)
    rows = FileRows.create(path, LAYERS, HEADS, COLUMNS, named=False)
    assert list(path.parent.iterdir()) == []
    add(rows, 0, 20, then=rows.sync)
    add(rows, 10, 30, 1, then=rows.sync)
    expect(rows, (0, 10, 0), (10, 30, 1))
    assert not rows.is_at(path)
    assert not rows.move(path)
    rows.close()


def test_a_tier_that_cannot_be_written_does_not_cost_the_turn(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = small.network(layers=2)
    run, plain = (small.engine(net, "adakv", "roco", 60) for _ in range(2))
    shape = run.kv.shape
    rows = FileRows.create(path, 2, shape.kv_heads, columns_of(shape, net.dtype, False))
    run.kv.tier = Tier(shape, net.dtype, run.kv.device, rows=rows)
    monkeypatch.setattr(os, "pwritev", full)
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


def test_a_file_that_was_forgotten_is_closed(path: Path) -> None:
    """A chat that nobody closed frees its file's descriptor, lock and disk space."""
    made = FileRows.create(path, LAYERS, HEADS, COLUMNS)
    add(made, 0, 9)
    handles = made._handle, made._folder
    del made
    gc.collect()
    for handle in handles:
        assert handle is not None
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(handle)
    found = FileRows.open(path)  # it is not locked
    expect(found, (0, 9, 0))
    found.close()


def test_a_closed_descriptor_is_not_closed_again(path: Path) -> None:
    """Its number may be another file's by then."""
    made = FileRows.create(path, LAYERS, HEADS, COLUMNS)
    made.close()
    others = [os.open(path, os.O_RDONLY) for _ in range(2)]
    del made
    gc.collect()
    for other in others:
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
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(told or KeyboardInterrupt):
        FileRows.create(path, LAYERS, HEADS, COLUMNS)
    assert not path.exists()
    monkeypatch.setattr(os, "unlink", fail)  # of one without a name
    with pytest.raises(told or KeyboardInterrupt):
        FileRows.create(path, LAYERS, HEADS, COLUMNS, named=False)
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


@pytest.mark.parametrize("there", ["nothing", "a tier", "a file"])
def test_a_tier_moves_on_its_own_disk_alone(
    rows: FileRows, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    """Over another one, or over a file of an earlier version; a failure changes nothing."""
    add(rows, 0, 20)
    rows.kept = False
    goal = tmp_path / "there.kv"
    if there == "a file":
        goal.write_text("old")
    elif there == "a tier":
        FileRows.create(goal, LAYERS, HEADS, COLUMNS).close()
    before, real = sorted(tmp_path.rglob("*")), os.rename

    def failing(code: int) -> Callable[[Path, Path], None]:
        def fail(source: Path, into: Path) -> None:
            if source == path:
                raise OSError(code, os.strerror(code))
            real(source, into)

        return fail

    monkeypatch.setattr(os, "rename", failing(errno.EXDEV))
    assert not rows.move(goal)
    monkeypatch.setattr(os, "rename", failing(errno.EACCES))
    with pytest.raises(OSError, match=os.strerror(errno.EACCES)):
        rows.move(goal)
    assert (rows.path, rows.kept, sorted(tmp_path.rglob("*"))) == (path, False, before)
    monkeypatch.setattr(os, "rename", real)
    assert rows.move(goal)
    assert (rows.path, rows.kept, list(tmp_path.iterdir())) == (goal, True, [goal])
    expect(rows, (0, 20, 0))
    add(rows, 20, 30)
    assert found_of_closed(rows, goal) == (30, "")


def found_of_closed(rows: FileRows, path: Path) -> tuple[int, str]:
    rows.close()
    return found_of(path)


def test_a_file_knows_whether_it_is_at_a_place(rows: FileRows, path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.kv"
    assert rows.is_at(path)
    assert not rows.is_at(other)
    other.write_text("x")
    assert not rows.is_at(other)
    assert rows.path == path
    other.unlink()
    path.rename(other)
    assert not rows.is_at(path)
    assert rows.is_at(other)
    assert rows.path == other


def test_whenever_a_process_ends_the_last_manifest_is_whole(
    rows: FileRows, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory as it is before and after each call that changes it: what is found is what was
    committed before, or what is being committed."""
    possible: list[tuple[int, int]] = []  # rows, and the seed of the last one
    seen = []

    def look() -> None:
        copy = tmp_path / f"copy-{len(seen)}"
        shutil.copytree(path, copy)
        found = FileRows.open(copy)
        assert found.damage == ""
        seen.append((found.rows, found.ids[-1] // 1000 if found.rows else 0))
        assert seen[-1] in possible
        for layer in range(LAYERS if found.rows else 0):
            found.read(layer, found.rows)  # checks its parts
        found.close()

    def looking(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            look()
            done = real(*given, **more)
            look()
            return done

        return call

    for name in ("pwritev", "replace"):
        monkeypatch.setattr(os, name, looking(getattr(os, name)))
    rows_before = [(0, 0)]
    for have, end, seed, last in ((0, 20, 1, 0), (20, 31, 2, 1), (25, 60, 3, 2), (10, 40, 4, 1)):
        possible[:] = [*rows_before, (have, last), (end, seed)]
        add(rows, have, end, seed, then=rows.sync)
        rows_before = [(end, seed)]
    monkeypatch.undo()
    assert set(seen) == {(0, 0), (20, 1), (31, 2), (25, 2), (60, 3), (10, 1), (40, 4)}


def test_nothing_new_is_nothing_to_write(rows: FileRows, path: Path) -> None:
    """A prompt of which the file has all rows, and one that it had before."""
    add(rows, 0, 20)
    rows.sync()
    before = [(file.name, file.stat().st_mtime_ns) for file in path.iterdir()]
    rows.reserve(20, 20)
    for layer in range(LAYERS):
        rows.write(layer, 20, {name: rows.read(layer, 20)[name][:, 20:] for name in COLUMNS})
    rows.commit(20)
    rows.drop()
    assert [(file.name, file.stat().st_mtime_ns) for file in path.iterdir()] == before
    expect(rows, (0, 20, 0))


def test_a_cleared_file_has_no_rows_and_gives_its_room_back(rows: FileRows, path: Path) -> None:
    add(rows, 0, 200)
    rows.clear()
    assert (rows.rows, rows.ids, rows.nbytes) == (0, [], 0)
    assert (path / "rows").stat().st_size == 0
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

CHECKS = [1] * (1 + LAYERS)
IMPOSSIBLE: list[object] = [
    [],
    {"columns": {}},
    {"columns": []},
    {"columns": {"k": ["float64", [8]]}},
    {"columns": {"k": ["float32", [1 << 20]]}},
    {"layers": 0},
    {"heads": True},
    {"rows": 20},
    {"rows": 20, "segments": [[0, 20, CHECKS[1:]]]},
    {"rows": 20, "segments": [[0, 20, [*CHECKS[1:], -1]]]},
    {"rows": 20, "segments": [[1, 20, CHECKS]]},
    {"rows": 21, "segments": [[0, 20, CHECKS]]},
    {"rows": 0, "segments": [[0, 20, CHECKS]]},
    {"rows": 20.0, "segments": [[0, 20, CHECKS]]},
    {"rows": 20, "segments": [[0, 1 << 31, CHECKS]]},
    {"rows": 30, "segments": [[0, 20, CHECKS], [21, 9, CHECKS]]},
    {"rows": 30, "segments": [[0, 20, CHECKS], [0, 30, CHECKS]]},
    {"rows": 30, "segments": [[0, 20]]},
    {"segments": None},
]


@pytest.mark.parametrize("says", IMPOSSIBLE)
def test_a_manifest_that_says_what_cannot_be_is_refused(path: Path, says: object) -> None:
    """Its checksum fits. With nothing of it changed it is read."""
    FileRows.create(path, LAYERS, HEADS, COLUMNS, {"model": "x"}).close()
    data = (path / "manifest").read_bytes()
    made = json.loads(data.split(b"\n", 1)[1])
    (path / "manifest").write_bytes(tier_file.sealed(json.dumps(made).encode()))
    assert header_of(path) == tier_file.Header(LAYERS, HEADS, COLUMNS, {"model": "x"})
    text = json.dumps(made | says if isinstance(says, dict) else says).encode()
    (path / "manifest").write_bytes(tier_file.sealed(text))
    for read in (header_of, FileRows.open):
        with pytest.raises(TierError, match=r"tier.kv does not say what it is"):
            read(path)
    (path / "manifest").write_bytes(data.replace(b"tier 2", b"tier 3"))
    with pytest.raises(TierError, match="is damaged, or of another version of minikv"):
        header_of(path)


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


def test_memory_that_a_gpu_copies_from_is_exact_and_given_back(rows: FileRows) -> None:
    runtime = Runtime(10 << 20)
    rows._memory = Pinned(runtime)
    add(rows, 0, 100)
    rows.reserve(150, 100)
    for layer in range(LAYERS):
        rows.read(layer, 150)
        assert sum(runtime.held.values()) == rows.working > 0
    rows.drop()
    assert runtime.held == {}
    expect(rows, (0, 100, 0))
