"""Packed weights that were kept: read again bit for bit, made anew when damaged, and never the
cause of an error."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Spec, edit_tensors, write
from safetensors import safe_open

import minikv.models as models
from minikv.errors import Interrupted
from minikv.kernels.dispatch import Kernels
from minikv.models import linear, packed, packed_files
from minikv.models.checkpoint import Checkpoint
from minikv.models.config import ModelConfig
from minikv.models.llama import Llama
from minikv.models.packed import Packed
from minikv.models.weights import load_network

FORMS = ("int8", "int8+head", "int4", "int4+head")
Usage = namedtuple("Usage", "total used free")


class Watcher:
    """A `Progress` that remembers what it was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.read = self.written = 0

    def planned(self, files: int, size: int, free: int | None) -> None: ...
    def download(self, done: int, total: int) -> None: ...

    def weights(self, done: int, total: int) -> None:
        self.read = done

    def packed_weights(self, done: int, total: int) -> None:
        self.written = done

    def say(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "LEAST", 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(Spec(hidden=64, heads=4, kv_heads=2, extra={"intermediate_size": 96}), tmp_path / "model")
    return tmp_path / "model"


def load(folder: Path, form: str = "int8", watcher: Watcher | None = None) -> tuple[Llama, int]:
    """The network, and how many of its matrices were packed."""
    count = [0]

    def counted(pack: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            count[0] += 1
            pack(*arguments)

        return run

    ops = Kernels()
    ops.pack_int8, ops.pack_int4 = counted(linear.pack_int8), counted(linear.pack_int4)
    checkpoint, config = Checkpoint.open(folder), ModelConfig.from_folder(folder)
    told = watcher or Watcher()
    kept = Packed("mine", folder, checkpoint, config, form, told)
    network = load_network(
        checkpoint,
        config,
        dtype=torch.bfloat16,
        form=form,
        packing=lambda: ops,
        packed=kept,
        progress=told.weights,
    )
    kept.keep(network)
    return network, count[0]


def numbers(network: Llama) -> dict[str, torch.Tensor]:
    """Every tensor of a network, packed or not."""
    found = {"embedding": network.embedding, "norm": network.norm, "head": network.head}
    for i, layer in enumerate(network.layers):
        found |= {f"{i}.{slot}": getattr(layer, slot) for slot in layer.__slots__}
    made: dict[str, torch.Tensor] = {}
    for name, part in found.items():
        if isinstance(part, torch.Tensor):
            made[name] = part
        elif isinstance(part, linear.Plain):
            made[name] = part.weight
            if part.bias is not None:
                made[f"{name}.bias"] = part.bias
        elif part is not None:
            made |= {f"{name}.{key}": tensor for key, tensor in part.parts().items()}
    return made


def same(one: Llama, two: Llama) -> bool:
    a, b = numbers(one), numbers(two)
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a
    )


def files() -> list[Path]:
    return [one.path for one in packed_files.listed()]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "spec",
    [
        Spec(hidden=64),
        Spec(hidden=64, tied=True, bias=True, mlp_bias=True, layout="sharded"),
        Spec(hidden=64, layout="original"),
        Spec(hidden=64, family="qwen2"),
    ],
    ids=lambda spec: spec.name,
)
def test_the_second_start_packs_nothing_and_has_the_same_bits(
    form: str, spec: Spec, tmp_path: Path
) -> None:
    write(spec, tmp_path)
    before, watcher = Watcher(), Watcher()
    first, packs = load(tmp_path, form, watcher=before)
    assert packs > 0
    second, packs = load(tmp_path, form, watcher=watcher)
    assert packs == 0
    assert watcher.read == before.read > 0  # what is read is told to the end
    assert same(first, second)
    assert watcher.lines == []
    assert watcher.written == 0
    without = load_network(
        Checkpoint.open(tmp_path),
        ModelConfig.from_folder(tmp_path),
        dtype=torch.bfloat16,
        form=form,
    )
    assert same(first, without)
    assert second.weight_bytes == without.weight_bytes


def test_the_disk_is_named_before_it_is_written_to(folder: Path) -> None:
    watcher = Watcher()
    load(folder, watcher=watcher)
    (line,) = watcher.lines
    assert line.startswith("keeping the packed weights for the next start: 0.")
    assert str(packed_files.store()) in line
    assert " free" in line
    assert '`keep_packed="off"`' in line
    (path,) = files()
    assert 0 < watcher.written < path.stat().st_size
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert sorted(os.listdir(path.parent)) == [path.name]


def test_the_file_is_safetensors(folder: Path) -> None:
    network, _ = load(folder, "int8")
    (path,) = files()
    with safe_open(path, "pt") as file:
        assert file.metadata()["model"] == "mine"
        down = file.get_tensor("layers.1.down.quantised")
    matrix = network.layers[1].down
    assert isinstance(matrix, linear.Int8)
    assert torch.equal(down, matrix.quantised)


@pytest.mark.parametrize(
    "where", ["first", "middle", "last matrix", "header", "checksums", "cut", "empty"]
)
def test_a_damaged_file_is_one_line_and_made_anew(where: str, folder: Path) -> None:
    want, packs = load(folder)
    (path,) = files()
    good = path.read_bytes()
    start = 8 + int.from_bytes(good[:8], "little")
    checks = 4 * 2 * 4 * 2  # two tensors of four matrices in two layers
    at = {
        "first": start,
        "middle": (start + len(good)) // 2,
        "last matrix": len(good) - checks - 1,
        "header": start // 2,
        "checksums": len(good) - 1,
        "cut": len(good) - 100,
        "empty": 0,
    }[where]
    damaged = good[:at] if where in ("cut", "empty") else good[:at] + b"\xa5" + good[at + 1 :]
    assert damaged != good
    path.write_bytes(damaged)
    watcher = Watcher()
    got, again = load(folder, watcher=watcher)
    assert same(want, got)
    assert 0 < again <= packs
    assert [line for line in watcher.lines if "damaged" in line] == watcher.lines[:1]
    assert path.read_bytes() == good
    assert load(folder)[1] == 0


def test_what_is_intact_before_the_damage_is_not_packed_again(folder: Path) -> None:
    _, packs = load(folder)
    (path,) = files()
    data = bytearray(path.read_bytes())
    data[-2] ^= 1  # a checksum of the last layer
    path.write_bytes(data)
    assert 0 < load(folder)[1] < packs


def test_a_changed_model_is_packed_again(folder: Path) -> None:
    first, _ = load(folder)
    shard = folder / "model.safetensors"
    edit_tensors(shard, lambda t: {k: v if "down" not in k else v + 1 for k, v in t.items()})
    second, packs = load(folder)
    assert packs > 0
    assert not same(first, second)
    assert len(files()) == 2
    about = shard.stat()
    os.utime(shard, ns=(about.st_atime_ns, about.st_mtime_ns + 1))  # only its time
    assert load(folder)[1] > 0
    os.utime(shard, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert load(folder)[1] > 0  # the system's own time of change is another
    assert load(folder)[1] == 0


def test_a_damaged_file_that_was_copied_anew_is_packed_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cp -p` keeps the size and the time of change, and no sample holds the damage."""
    monkeypatch.setattr(packed, "_SAMPLES", 2)
    monkeypatch.setattr(packed, "_PAGE", 64)
    shard = folder / "model.safetensors"
    entry = Checkpoint.open(folder).entries["model.layers.0.mlp.up_proj.weight"]
    shutil.copy2(shard, folder.parent / "copy")
    about, data = shard.stat(), bytearray(shard.read_bytes())
    data[entry.start + 103] ^= 0x40
    shard.write_bytes(data)
    os.utime(shard, ns=(about.st_atime_ns, about.st_mtime_ns))
    damaged, _ = load(folder)
    shutil.copy2(folder.parent / "copy", shard)
    assert shard.stat().st_mtime_ns == about.st_mtime_ns
    again, packs = load(folder)
    assert packs > 0
    assert not same(damaged, again)


def test_forms_and_layouts_have_files_of_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for form in FORMS:
        assert load(folder, form)[1] > 0
    assert len(files()) == len(FORMS)

    def key(form: str) -> str:
        checkpoint, config = Checkpoint.open(folder), ModelConfig.from_folder(folder)
        return packed.key(checkpoint, config, form)

    keys = {}
    for half in (16, 32, None):
        monkeypatch.setattr(packed, "half_tile", lambda half=half: half)
        keys[half] = (key("int4"), key("int8"))
    assert len({four for four, _ in keys.values()}) == 3  # the layout of four bits differs
    assert len({eight for _, eight in keys.values()}) == 1


GOLDEN = {
    "int8": "0d72c1efeba580ff",
    "int4 32": "71f88080531d8d74",
    "int4 16": "902d86fb05b8c2fc",
    "int4 None": "102206ddb8bcd761",  # the scales alone: torch's layout is not known
}


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_the_rule_of_packing_is_the_one_of_the_kept_files(form: str) -> None:
    steps = torch.arange(40 * 64)
    weight = (((steps * 7919 + 13) % 2039 - 1000).float() / 1000).view(40, 64).bfloat16()
    weight[3] = 0
    half = linear.half_tile()
    matrix = linear.kept(linear.Plain(weight), form)
    assert isinstance(matrix, linear.Int8 | linear.Int4)
    parts = matrix.parts()
    if form == "int4" and half is None:
        del parts["packed"]
    made = hashlib.sha256()
    for part in parts.values():
        made.update(part.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    want = GOLDEN[form if form == "int8" else f"int4 {half}"]
    assert made.hexdigest()[:16] == want, (
        "weights are packed in another way than those that are kept on users' disks: "
        "raise packed_files.FORMAT, then put the new hash here"
    )
    assert packed_files.FORMAT == "minikv packed weights 2", "are these hashes of the new format?"


def test_off_neither_reads_nor_writes() -> None:
    first = models.load(None, weights="int8").network
    assert files() == []
    second = models.load(None, weights="int8", keep_packed=True).network
    assert [path.name[32:] for path in files()] == ["-int8.safetensors"]
    assert same(first, second)
    for path in files():
        path.write_bytes(b"")
    watcher = Watcher()
    models.load(None, weights="int8", progress=watcher)
    models.load(None, weights="auto", keep_packed=True, progress=watcher)
    assert watcher.lines == []
    models.load(None, weights="int8", keep_packed=True, progress=watcher)
    assert "damaged" in watcher.lines[0]


def failing(error: int) -> Callable[..., None]:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error))

    return refuse


@pytest.mark.parametrize(
    ("owner", "name", "act", "said"),
    [
        (shutil, "disk_usage", lambda _: Usage(1 << 40, 1 << 40, 1 << 20), "1.0 MiB of the disk"),
        (packed, "write", failing(errno.ENOSPC), "again: No space left on device"),
        (Path, "mkdir", failing(errno.EROFS), "again: Read-only file system"),
    ],
    ids=["full", "filling", "read-only"],
)
def test_a_disk_that_takes_nothing_is_one_line(
    owner: object,
    name: str,
    act: Callable[..., Any],
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watcher = Watcher()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, act)
        assert load(folder, watcher=watcher)[1] > 0
    *before, line = watcher.lines
    assert len(before) == (name == "write")  # that it will write is said already
    assert line.startswith("the packed weights are not kept, and the next start packs again: ")
    assert said in line
    assert not packed_files.store().exists() or os.listdir(packed_files.store()) == []


def test_a_model_that_cannot_be_read_is_not_called_damaged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(folder)
    checkpoint, config = Checkpoint.open(folder), ModelConfig.from_folder(folder)
    (folder / "model.safetensors").rename(folder / "elsewhere")
    watcher = Watcher()
    kept = Packed("mine", folder, checkpoint, config, "int8", watcher)
    kept.close()
    (line,) = watcher.lines
    assert line.startswith("packed weights are neither read nor kept: ")
    assert "model.safetensors" in line


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (a_pipe, "is not a regular file"),
        (lambda path: path.chmod(0o620), "others may write to it"),
    ],
)
def test_a_file_that_is_not_trusted_is_replaced(
    change: Callable[[Path], None], said: str, folder: Path
) -> None:
    want, _ = load(folder)
    (path,) = files()
    change(path)
    watcher = Watcher()
    got, packs = load(folder, watcher=watcher)
    assert packs > 0
    assert same(want, got)
    assert said in watcher.lines[0]
    assert path.stat().st_mode & 0o777 == 0o600
    assert load(folder)[1] == 0


def test_a_directory_is_known_by_its_path_and_a_model_of_the_hub_by_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for name in (".", "../model", str(folder)):
        assert packed.known_as(name, folder) == str(folder)
    assert packed.known_as("owner/name", folder) == "owner/name"


def test_ctrl_c_while_writing_leaves_nothing(folder: Path) -> None:
    class Stops(Watcher):
        def packed_weights(self, done: int, total: int) -> None:
            if done:
                raise Interrupted("stopped")

    with pytest.raises(Interrupted):
        load(folder, watcher=Stops())
    assert os.listdir(packed_files.store()) == []


def test_few_bytes_are_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "LEAST", 1 << 20)
    watcher = Watcher()
    load(folder, watcher=watcher)
    assert (files(), watcher.lines) == ([], [])
