"""A tier in a file gives what a tier in RAM gives, bit for bit. Whatever happened to it, a later
answer is that of reading everything anew."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import os
import random
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import forked
import pytest
import small
import torch
from refusals import failing
from tiers import Runtime, tiered
from torch import Tensor
from twins import Nth

from minikv.cache import tier_file
from minikv.cache.tier import Rows, copy_rows
from minikv.cache.tier_file import FileRows, Header, is_open
from minikv.cache.tier_rows import Columns, Memory, RamRows, TierError, columns_of
from minikv.chat.transcript import shared
from minikv.models.llama import Llama

LAYERS, HEADS = 3, 2
COLUMNS: Columns = {"k": (torch.float32, (8,)), "v": (torch.float32, (8,))}
HEADER = Header(LAYERS, HEADS, COLUMNS, {"model": "x"})
ROW = LAYERS * HEADS * 2 * 32
"""Bytes of a row."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tier.kv"


@pytest.fixture
def rows(path: Path) -> Iterator[FileRows]:
    made = FileRows.create(path, HEADER)
    yield made
    made.close()


def column(layer: int, name: str, begin: int, end: int) -> Tensor:
    """What a test writes: every number is another one."""
    at = torch.arange(begin, end).float()[None, :, None]
    wide = at + torch.arange(HEADS)[:, None, None] * 1e4
    return wide + layer * 1e5 + torch.arange(8) / 16 + (0.5 if name == "v" else 0)


def add(rows: Rows, have: int, end: int) -> None:
    """A prompt, as a cache reads it."""
    rows.reserve(end, have)
    for layer in range(LAYERS):
        place = rows.read(layer, end)
        for name in COLUMNS:
            place[name][:, have:] = column(layer, name, have, end)
        rows.write(layer, have, {name: place[name][:, have:] for name in COLUMNS})
    rows.commit(end, range(end))
    rows.drop()


def expect(rows: Rows, count: int) -> None:
    for layer in range(LAYERS):
        for name, found in rows.read(layer, count).items():
            assert torch.equal(found, column(layer, name, 0, count))
    rows.drop()


def opened() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def test_rows_come_back_in_this_process_and_in_the_next(rows: FileRows, path: Path) -> None:
    """In files that are the user's alone, and in no more bytes than the rows have."""
    for have, end in ((0, 100), (100, 130), (130, 131)):
        add(rows, have, end)
    expect(rows, 131)
    rows.sync()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}
    assert sorted(file.name for file in path.iterdir()) == ["manifest", "rows"]
    assert rows.nbytes == (path / "rows").stat().st_size == 131 * ROW
    rows.close()
    found = FileRows.open(path)
    assert (found.rows, found.damage, found.ids) == (131, "", list(range(131)))
    assert found.header == HEADER
    add(found, 131, 140)
    expect(found, 140)
    add(found, 0, 20)  # another conversation
    expect(found, 20)
    found.close()


def test_nothing_new_is_nothing_to_write(rows: FileRows, path: Path) -> None:
    written = []
    for have in (0, 20):
        add(rows, have, 20)
        rows.sync()
        written.append([(file.name, file.stat().st_mtime_ns) for file in path.iterdir()])
    assert written[0] == written[1]
    expect(rows, 20)


def test_a_layer_is_read_while_the_one_before_is_used_and_checked_once(
    rows: FileRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most two layers are in memory, pinned ones for a GPU. Some systems move fewer bytes at
    once than they were asked to."""
    runtime, real, read, checked = Runtime(10 << 20), os.preadv, [], []
    rows.memory = Memory(torch.device("cpu"), runtime)

    def short(real: Callable[..., int]) -> Callable[..., int]:
        return lambda handle, pieces, at: real(handle, [memoryview(pieces[0])[:1000]], at)

    def preadv(handle: int, pieces: list[memoryview], at: int) -> int:
        read.append(at * LAYERS // rows.nbytes)
        return short(real)(handle, pieces, at)

    def checksum(pieces: Any, known: Any = tier_file._checksum) -> int:
        checked.append(len(pieces))
        return int(known(pieces))

    add(rows, 0, 100)
    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "pwritev", short(os.pwritev))
    monkeypatch.setattr(tier_file, "_checksum", checksum)
    for turn in range(2):
        read.clear()
        rows.reserve(120, 100)
        for layer in range(LAYERS):
            rows.read(layer, 120)
            assert sum(runtime.held.values()) == 2 * 120 * ROW // LAYERS
            rows._last.result()
            assert sorted(set(read)) == [*range(min(layer + 2, LAYERS))]
        assert read == sorted(read)
        assert len(checked) == LAYERS, turn
        rows.drop()
        assert runtime.held == {}
    monkeypatch.setattr(tier_file, "_checksum", lambda pieces: 0)
    add(rows, 100, 120)
    expect(rows, 120)


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("windows", [None, (None, 40)])
def test_a_file_gives_what_ram_gives_bit_for_bit(
    path: Path, coded: bool, staged: bool, windows: tuple[int | None, ...] | None
) -> None:
    """Over turns, an undo, a process that ended, and copies there and back."""
    net = small.network(layers=2, windows=windows)
    shape, columns = small.shape(net), columns_of(small.shape(net), net.dtype, coded)
    header = Header(2, shape.kv_heads, columns)
    made = FileRows.create(path, header)
    ram, disk = (
        tiered(small.engine(net, "adakv", "roco", 60), coded=coded, staged=staged, rows=rows)
        for rows in (None, made)
    )
    one, two = ram.kv.tier, disk.kv.tier
    ids = small.ids(150)
    for turn in range(5):
        if turn == 2:
            ids = ids[:120] + small.ids(50, seed=77)
            one.truncate(120)
            two.truncate(120)
        two.ids = ids
        assert torch.equal(ram.recall(ids), disk.recall(ids))
        for token in small.ids(5, seed=turn):
            assert torch.equal(ram.step(token), disk.step(token))
        assert one.length == two.length == len(ids)
        for layer in range(2):
            for name, kept in two.rows.read(layer, len(ids)).items():
                assert torch.equal(kept, one.rows.read(layer, len(ids))[name])
        two.drop()
        if turn == 3:
            made.close()
            found, one.rows = FileRows.open(path), RamRows(2, shape.kv_heads, columns, 4096)
            assert found.ids == ids
            copy_rows(found, one.rows, 2, len(ids))
            found.close()
            two.rows = made = FileRows.create(path.with_name("copy"), header)
            copy_rows(one.rows, made, 2, len(ids), ids)
        ids = ids + small.ids(5, seed=turn) + small.ids(9, seed=50 + turn)
    made.close()


# -- a later answer is that of reading anew ---------------------------------------------------

NET = small.network(layers=2)
TALK = [small.ids(60), small.ids(90), small.ids(80) + small.ids(25, seed=7), small.ids(120)]
"""The tokens of a conversation after each turn: after the second one it is taken back a bit."""


class Chat:
    """A process that keeps its conversation in the tier of `path`, as `Recall` does."""

    def __init__(self, path: Path) -> None:
        self.run, self.rows = small.engine(NET, "adakv", "roco", 40), None
        self.told: list[TierError] = []
        shape = self.run.kv.shape
        try:
            if path.exists():
                self.rows = FileRows.open(path)
            else:
                columns = columns_of(shape, NET.dtype, False)
                self.rows = FileRows.create(path, Header(2, shape.kv_heads, columns))
        except TierError as error:
            self.told.append(error)
            return
        tiered(self.run, rows=self.rows).kv.tier.length = self.rows.rows  # type: ignore[union-attr]

    def answer(self, ids: list[int]) -> tuple[Tensor, int]:
        """The logits after `ids`, and how many rows the tier gave."""
        tier = self.run.kv.tier
        if tier is None:
            self.run.reset()
            return self.run.prompt(ids), 0
        tier.ids = ids
        tier.truncate(shared(self.rows.ids, ids))
        had = tier.length
        try:
            found = self.run.recall(ids)
        except TierError as error:
            self.told.append(error)
            self.run.kv.abandon()
            tier.truncate(error.rows or 0)
            if error.rows is None:
                self.run.kv.tier = None
            return self.answer(ids)
        if tier.failed is not None:
            self.told.append(tier.failed)
            self.run.kv.tier = None
        return found, had

    def end(self) -> None:
        if self.rows is not None:
            try:
                self.rows.sync()
            except TierError as error:
                self.told.append(error)
            self.rows.close()


def anew(ids: list[int], net: Llama = NET, known: dict[tuple[int, ...], Tensor] = {}) -> Tensor:  # noqa: B006
    if tuple(ids) not in known:
        known[tuple(ids)] = small.engine(net, "adakv", "roco", 40).prompt(ids)
    return known[tuple(ids)]


def right(chat: Chat, ids: list[int]) -> int:
    """The answer is right. Returns how many rows the tier gave."""
    found, had = chat.answer(ids)
    torch.testing.assert_close(found, anew(ids), atol=1e-4, rtol=1e-4)
    return had


def right_later(path: Path, *more: int) -> list[int]:
    """So are those of the processes after it."""
    given = []
    for last in (TALK[-1], [*TALK[-1], *small.ids(9, seed=3), *more]):
        chat = Chat(path)
        given.append(right(chat, last))
        chat.end()
    return given


@pytest.fixture(scope="module")
def talked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a process left: `tier.kv`; `old` after its first two turns; `foreign`, another chat's,
    as long as it."""
    folder = tmp_path_factory.mktemp("talked")
    chat, other = Chat(folder / "tier.kv"), Chat(folder / "foreign")
    for turn, ids in enumerate(TALK):
        right(chat, ids)
        right(other, [*small.ids(60, seed=9), *ids][: len(ids)])
        if turn == 1:
            chat.rows.sync()
            shutil.copytree(folder / "tier.kv", folder / "old")
    chat.end()
    other.end()
    return folder


SPOIL: dict[str, Callable[[bytes, int, int], bytes]] = {
    "altered": lambda data, a, b: data[:a] + bytes([data[a] ^ 4]) + data[a + 1 :],
    "cut": lambda data, a, b: data[:a] + data[b:],
    "zeroed": lambda data, a, b: data[:a] + bytes(b - a) + data[b:],
}
PUT: dict[str, Callable[[Path, Path], object]] = {
    "nothing": lambda place, aside: None,
    "link": lambda place, aside: place.symlink_to(aside),
    "pipe": lambda place, aside: os.mkfifo(place),
    "file": lambda place, aside: place.write_bytes(b"minikv tier 1\n"),
}


@pytest.mark.parametrize("name", ["rows", "manifest"])
@pytest.mark.parametrize("where", [(0, 1), (0, 0.4), (0.4, 1), (0.4, 0.5), (0.99, 1)])
@pytest.mark.parametrize("how", SPOIL)
def test_after_damage_answers_are_right(
    path: Path, talked: Path, name: str, where: tuple[float, float], how: str
) -> None:
    shutil.copytree(talked / "tier.kv", path)
    data = (path / name).read_bytes()
    (path / name).write_bytes(SPOIL[how](data, *(int(part * len(data)) for part in where)))
    before = opened()
    assert right_later(path)[0] <= 105
    assert opened() == before


@pytest.mark.parametrize("names", [("rows",), ("manifest",), ("rows", "manifest")])
@pytest.mark.parametrize(("source", "given"), [("foreign", [0]), ("old", [60, 80, 90])])
def test_beside_files_of_another_chat_or_time_answers_are_right(
    path: Path, talked: Path, source: str, names: tuple[str, ...], given: list[int]
) -> None:
    shutil.copytree(talked / "tier.kv", path)
    for name in names:
        shutil.copy(talked / source / name, path / name)
    assert right_later(path)[0] in given


@pytest.mark.parametrize("name", ["", "rows", "manifest"])
@pytest.mark.parametrize("what", PUT)
def test_in_the_place_of_what_is_no_tier_answers_are_right(
    path: Path, talked: Path, name: str, what: str
) -> None:
    """It is not followed, and nothing waits for it."""
    shutil.copytree(talked / "tier.kv", path)
    shutil.move(path / name, path.parent / "aside")
    PUT[what](path / name, path.parent / "aside")
    before = opened()
    assert right_later(path)[0] == 0
    assert opened() == before


def test_every_altered_byte_is_found(rows: FileRows, path: Path, part: float) -> None:
    """And the rows before it are given."""
    add(rows, 0, 20)
    add(rows, 20, 31)
    rows.close()
    draw = random.Random(5)
    whole = {name: (path / name).read_bytes() for name in ("manifest", "rows")}
    for name, data in whole.items():
        every = range(len(data))
        for at in every if part == 1 else draw.sample(every, 100):
            altered = bytearray(data)
            altered[at] ^= 1 << draw.randrange(8)
            for one in whole:
                (path / one).write_bytes(altered if one == name else whole[one])
            if name == "manifest":
                with pytest.raises(TierError, match="damaged"):
                    FileRows.open(path)
                continue
            found, intact = FileRows.open(path), 0 if at < 20 * ROW else 20
            with pytest.raises(TierError, match=f"damaged from token {intact} on") as error:
                expect(found, 31)
            assert error.value.rows == intact
            found.reserve(intact, intact)
            expect(found, intact)
            found.close()


FULL, SILENT, READ_ONLY = errno.ENOSPC, errno.EIO, errno.EROFS
CALLS = [("posix_fallocate", FULL), ("pwritev", FULL), ("preadv", SILENT), ("fdatasync", SILENT)]
CALLS += [("fsync", SILENT), ("replace", READ_ONLY), ("mkdir", READ_ONLY)]


@pytest.mark.parametrize(("name", "code"), CALLS)
def test_whichever_call_fails_answers_are_right(
    tmp_path: Path, name: str, code: int, monkeypatch: pytest.MonkeyPatch, part: float
) -> None:
    """In the turn itself, in those after it, and in later processes: a full disk, one that can only
    be read, one that does not answer."""
    anew(TALK[0])  # loads the kernels, which have a descriptor
    for n in itertools.count(0, 1 if part == 1 else 3):
        path, number = tmp_path / f"{n}.kv", itertools.count()
        before = opened()
        with monkeypatch.context() as patch:
            patch.setattr(os, name, Nth(getattr(os, name), number, n, code))
            chat = Chat(path)
            for ids in TALK:
                right(chat, ids)
            chat.end()
        assert right_later(path)[1] >= 112
        assert opened() == before
        if next(number) <= n:  # no call failed
            break
        assert os.strerror(code) in str(chat.told[0])
    assert n > 0
    assert not chat.told


def test_whenever_a_process_is_killed_answers_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory as it is before, within and after each call that changes it; nothing that it
    names is damaged."""
    path, copies = tmp_path / "tier.kv", []

    def look() -> None:
        copies.append(tmp_path / f"copy-{len(copies)}")
        shutil.copytree(path, copies[-1])

    def looking(real: Callable[..., Any], parts: bool) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            look()
            if parts:  # half of what is to be written
                handle, pieces, at = given
                real(handle, [memoryview(pieces[0])[: len(pieces[0]) // 2]], at)
                look()
            done = real(*given, **named)
            look()
            return done

        return call

    chat = Chat(path)
    for name in ("pwritev", "replace", "fdatasync"):
        monkeypatch.setattr(os, name, looking(getattr(os, name), name == "pwritev"))
    for ids in TALK:
        right(chat, ids)
    chat.rows.sync()
    monkeypatch.undo()
    given = set()
    for copy in copies:
        rows = FileRows.open(copy)
        assert rows.damage == ""
        for layer in range(2 if rows.rows else 0):
            rows.read(layer, rows.rows)  # checks its parts
        rows.close()
        later = Chat(copy)
        given.add(right(later, TALK[-1]))
        later.end()
    chat.end()
    # Each turn, also the one taken back; 112 of all rows, as the policy observes the last 8.
    assert given == {0, 60, 80, 90, 120}


# -- a file's life ----------------------------------------------------------------------------


def test_a_file_is_open_in_one_place(rows: FileRows, path: Path) -> None:
    """Until it is closed, also by nobody; asking leaves nobody's lock and no descriptor."""
    assert is_open(path)
    says = "is open in another minikv"
    with pytest.raises(TierError, match=says):
        FileRows.open(path)
    code = """if True:
        import sys; from pathlib import Path; from minikv.cache.tier_file import FileRows
        try: FileRows.open(Path(sys.argv[1]))
        except Exception as error: print(error)"""
    assert says in forked.run(str(path), code=code).out
    add(rows, 0, 9)
    rows.close()
    gc.collect()
    before = opened()
    found = FileRows.open(path)
    others = [os.open(path, os.O_RDONLY) for _ in range(2)]
    del found
    gc.collect()
    assert not is_open(path)
    found = FileRows.open(path)
    expect(found, 9)
    found.close()
    others += [os.open(path, os.O_RDONLY) for _ in range(2)]  # in the place of its descriptors
    del found
    gc.collect()
    for other in others:
        os.close(other)  # they were not closed with it once more
    assert opened() == before


@pytest.mark.parametrize(
    ("name", "code"),
    [("flock", errno.ENOLCK), ("posix_fallocate", errno.EOPNOTSUPP), ("posix_fallocate", None)],
)
def test_a_system_without_locks_or_room_ahead_is_written_to(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int | None
) -> None:
    owner = tier_file.fcntl if name == "flock" else os
    if code is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, Nth(print, itertools.repeat(0), 0, code))
    made = FileRows.create(path, HEADER)
    add(made, 0, 20)
    made.close()
    made = FileRows.open(path)
    expect(made, 20)
    made.close()


def test_a_file_without_a_name_is_gone_with_the_process_and_is_not_brought_to_the_disk(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So nobody waits for the disk."""
    for name in ("fdatasync", "fsync", "replace"):
        monkeypatch.delattr(os, name)
    rows = FileRows.create(path, HEADER, named=False)
    assert list(path.parent.iterdir()) == []
    add(rows, 0, 20)
    add(rows, 10, 30)
    rows.sync()
    expect(rows, 30)
    assert not rows.is_at(path)
    assert not rows.move(path)
    monkeypatch.setattr(os, "pwritev", Nth(os.pwritev, itertools.repeat(0), 0, errno.ENOSPC))
    with pytest.raises(TierError, match="No space left"):
        add(rows, 30, 40)
    assert rows.rows == 30
    expect(rows, 30)
    rows.close()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_a_file_that_cannot_be_begun_is_not_there(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    before = opened()
    for call in ("fsync", "unlink"):  # of one without a name
        monkeypatch.setattr(os, call, failing(error))
        with pytest.raises((TierError, KeyboardInterrupt)):
            FileRows.create(path, HEADER, named=call == "fsync")
        assert call == "unlink" or not path.exists()
    assert opened() == before


@pytest.mark.parametrize("there", ["nothing", "a tier", "a file"])
def test_a_tier_moves_on_its_own_disk_alone(
    rows: FileRows, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    """Over another one, or over a file. One that is not kept is gone when it is closed."""
    add(rows, 0, 20)
    rows.kept = False
    goal = tmp_path / "there.kv"
    if there == "a file":
        goal.write_text("old")
    elif there == "a tier":
        FileRows.create(goal, HEADER).close()
    for code in (errno.EXDEV, errno.EACCES):
        told = nullcontext() if code == errno.EXDEV else pytest.raises(OSError)
        with monkeypatch.context() as patch, told:
            patch.setattr(os, "rename", Nth(os.rename, itertools.count(), 0, code))
            assert not rows.move(goal)
        assert (rows.path, rows.kept, rows.is_at(path)) == (path, False, True)
    assert rows.move(goal)
    assert (rows.path, rows.kept, list(tmp_path.iterdir())) == (goal, True, [goal])
    add(rows, 20, 30)
    assert not rows.is_at(path)
    assert not rows.is_at(tmp_path)
    goal.rename(path)
    assert rows.is_at(path)
    assert rows.path == path
    rows.kept = False
    rows.close()
    rows.close()  # once more changes nothing
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("named", [True, False])
def test_a_tier_begins_with_the_rows_of_another(
    rows: FileRows, tmp_path: Path, *, named: bool
) -> None:
    """Beside others that read it, and after it is gone. `publish` renames it."""
    add(rows, 0, 20)
    add(rows, 20, 30)
    rows.sync()
    made = [FileRows.create(tmp_path / str(i), HEADER, named=named) for i in range(2)]
    made[0].rest_on(rows, range(20))
    expect(made[0], 20)
    add(made[0], 20, 40)
    if named:
        made[1].rest_on(made[0], range(40))
        add(made[1], 40, 50)
        made[1].publish(tmp_path / "goal")
    rows.kept = False
    rows.close()
    made[0].close()
    if named:
        made[1].close()
        for reader in [FileRows.open(tmp_path / "goal", shared=True) for _ in range(2)]:
            expect(reader, 50)
            reader.close()


# -- what others wrote ----------------------------------------------------------------------------

CHECKS, IDS = [1] * LAYERS, list(range(20))
SEGMENTS: list[object] = [
    *([], [[0, 20, CHECKS[1:]]], [[1, 20, CHECKS]], [[0, 19, CHECKS]], [[0, 20]], None),
    *([[0, 20.0, CHECKS]], [[0, 9, CHECKS], [10, 10, CHECKS]], [[0, 20, CHECKS]] * 2),
]
IMPOSSIBLE: list[object] = [
    *({"ids": IDS, "segments": segments} for segments in SEGMENTS),
    *({"ids": ids, "segments": [[0, 1, CHECKS]]} for ids in ([], [0.5], [1 << 60], None)),
    *({"columns": columns} for columns in ({}, [], {"k": ["float64", [8]]}, {"k": ["int8", [-1]]})),
    *([], {"layers": 0}, {"heads": 2.0}, {"identity": []}),
    *(
        {"ids": IDS, "segments": [[0, 20, CHECKS]], "files": files}
        for files in ([-1], [5000], [0, 0])
    ),
]


@pytest.mark.parametrize("says", IMPOSSIBLE)
def test_a_manifest_that_says_what_cannot_be_is_refused(
    rows: FileRows, path: Path, says: object
) -> None:
    """Its checksum fits. With nothing of it changed it is read."""
    rows.close()
    data = (path / "manifest").read_bytes()
    made = json.loads(data.split(b"\n", 1)[1])
    (path / "manifest").write_bytes(tier_file.sealed(json.dumps(made).encode()))
    again = FileRows.open(path)
    assert again.header == rows.header
    again.close()
    del made["files"]  # without them, all of a tier's rows are its own
    text = json.dumps(made | says if isinstance(says, dict) else says).encode()
    (path / "manifest").write_bytes(tier_file.sealed(text))
    with pytest.raises(TierError, match=r"the manifest of tier.kv is invalid"):
        FileRows.open(path)
    (path / "manifest").write_bytes(data.replace(b"tier 3", b"tier 4"))
    with pytest.raises(TierError, match="is damaged, or of another version of minikv"):
        FileRows.open(path)
