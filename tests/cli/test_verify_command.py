"""`minikv verify`: every file of a model against the hub's checksum, or the recorded one."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
from checkpoints import Spec, write
from test_hub import REPO, cache, files, written  # noqa: F401
from typer.testing import CliRunner, Result

from minikv.cli.main import app
from minikv.cli.paths import digests_folder
from minikv.cli.terminal import Terminal
from minikv.cli.verify_command import compared
from minikv.models import BUNDLED

SHARD = "model-00001-of-00010.safetensors"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["verify", *arguments])


def states(result: Result) -> dict[str, str]:
    """State by file name."""
    return {line.split()[1]: line.split()[0] for line in result.stdout.splitlines()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with a small sharded model."""
    made = tmp_path / "mine"
    write(Spec(layout="sharded"), made)
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(BUNDLED / name, made / name)
    return made


@pytest.fixture
def hub(cache: Path, files: dict[str, bytes]) -> Path:  # noqa: F811
    """A snapshot in the hub's cache, as the hub lays it out: large files by their SHA-256, small
    ones by git's checksum."""
    root = cache / "models--owner--some-model"
    snapshot = root / "snapshots" / ("0123456789" * 4)
    for path in (snapshot, root / "blobs", root / "refs"):
        path.mkdir(parents=True)
    (root / "refs" / "main").write_text(snapshot.name)
    for name, data in files.items():
        if name.endswith(".safetensors"):
            blob = hashlib.sha256(data).hexdigest()
        else:
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        (root / "blobs" / blob).write_bytes(data)
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    return snapshot


def flip(path: Path, draw: random.Random) -> None:
    """Turn one bit of a file around."""
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.resolve().write_bytes(data)


def test_the_bundled_model_is_as_shipped() -> None:
    result = run()
    assert result.exit_code == 0, result.output
    assert set(states(result).values()) == {"ok"}
    assert "model.safetensors" in states(result)
    assert not digests_folder().exists()


def test_a_hub_model_is_compared_with_the_hubs_own_checksums(hub: Path) -> None:
    """No network is used, and nothing is recorded."""
    result = run("-m", REPO)
    assert result.exit_code == 0, result.output
    assert set(states(result)) == {path.name for path in hub.iterdir()}
    assert set(states(result).values()) == {"ok"}
    assert not digests_folder().exists()


def test_a_file_in_the_place_of_a_link_is_not_the_hubs(hub: Path) -> None:
    """Editors write a new file and rename it: the link is gone, and with it the hub's checksum."""
    path = hub / "config.json"
    data = path.read_bytes().replace(b":", b": ", 1)
    path.unlink()
    path.write_bytes(data)
    for _ in range(2):
        result = run("-m", REPO)
        assert result.exit_code == 1
        assert states(result)["config.json"] == "unlinked"
        assert "in the place of the hub's own file" in result.stdout
        assert "recorded" not in result.stdout


def test_every_bit_flip_in_a_hub_model_is_found(hub: Path) -> None:
    """100 of 100, in weights, index, configuration and tokenizer."""
    draw = random.Random(7)
    read = sorted(states(run("-m", REPO)))
    found = 0
    for turn in range(100):
        path = hub / read[turn % len(read)]
        before = path.read_bytes()
        flip(path, draw)
        every = {one.name: one.state for one in compared(hub, False, False, Terminal())}
        found += every[path.name] == "differs"
        path.resolve().write_bytes(before)
    assert found == 100
    assert run("-m", REPO).exit_code == 0


def test_a_directory_is_recorded_first_and_compared_then(folder: Path) -> None:
    first = run("-m", str(folder))
    assert first.exit_code == 0, first.output
    assert set(states(first).values()) == {"recorded"}
    again = run("-m", str(folder))
    assert again.exit_code == 0
    assert set(states(again).values()) == {"ok"}
    assert "config.json" in states(again)
    draw = random.Random(3)
    for turn in range(8):
        path = folder / sorted(states(first))[turn % len(states(first))]
        before = path.read_bytes()
        flip(path, draw)
        result = run("-m", str(folder))
        assert result.exit_code == 1
        assert states(result)[path.name] == "differs"
        assert list(states(result).values()).count("differs") == 1
        assert "1 of" in result.stderr
        assert "--record" in result.stderr
        path.write_bytes(before)


def test_what_is_missing_or_new_is_told(folder: Path) -> None:
    run("-m", str(folder))
    (folder / SHARD).rename(folder / "away")
    (folder / "tokenizer_config.json").write_text("{}")
    result = run("-m", str(folder))
    assert result.exit_code == 1
    assert states(result)[SHARD] == "missing"
    assert states(result)["tokenizer_config.json"] == "new"
    (folder / "away").rename(folder / SHARD)
    assert run("-m", str(folder), "--record").exit_code == 0
    assert run("-m", str(folder)).exit_code == 0


def test_nothing_is_called_recorded_that_is_not(folder: Path) -> None:
    """The first run, of a directory that lacks a shard of its index."""
    (folder / SHARD).unlink()
    for _ in range(2):
        result = run("-m", str(folder))
        assert result.exit_code == 1
        assert set(states(result).values()) == {"missing", "unrecorded"}
        assert "the next run compares" not in result.stdout
        assert not digests_folder().exists()


def test_a_damaged_directory_is_not_taken_as_the_measure(folder: Path) -> None:
    """A truncated shard is refused as loading refuses it, and nothing is recorded."""
    with (folder / SHARD).open("r+b") as file:
        file.truncate((folder / SHARD).stat().st_size - 1)
    result = run("-m", str(folder))
    assert result.exit_code == 6
    assert "truncated" in result.stderr
    assert not digests_folder().exists()


def test_json_has_every_checksum(folder: Path) -> None:
    run("-m", str(folder))
    flip(folder / SHARD, random.Random(0))
    result = run("-m", str(folder), "--json")
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert told["ok"] is False
    (bad,) = [one for one in told["files"] if one["state"] == "differs"]
    assert bad["name"] == SHARD
    assert bad["found"] == hashlib.sha256((folder / SHARD).read_bytes()).hexdigest()
    assert bad["expected"] != bad["found"]


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"format": 1, "files": {"a": 1}}', b"\xff"])
def test_a_record_that_is_damaged_is_one_line(folder: Path, data: bytes) -> None:
    run("-m", str(folder))
    (path,) = digests_folder().iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(data)
    result = run("-m", str(folder))
    assert result.exit_code == 2
    assert "cannot be read" in result.stderr
    assert "bug" not in result.output
    assert run("-m", str(folder), "--record").exit_code == 0


def test_a_model_that_is_not_here_is_not_fetched(cache: Path) -> None:  # noqa: F811
    assert str(cache) == huggingface_hub.constants.HF_HUB_CACHE
    result = run("-m", "no/such")
    assert result.exit_code == 3
    assert "minikv models pull no/such" in result.stderr


def test_a_file_that_cannot_be_read_has_its_reason(folder: Path) -> None:
    run("-m", str(folder))
    os.unlink(folder / "tokenizer.json")
    os.symlink("/proc/self/mem", folder / "tokenizer.json")  # its first byte gives EIO
    result = run("-m", str(folder))
    assert result.exit_code == 1
    assert states(result)["tokenizer.json"] == "unreadable"
    assert os.strerror(5) in result.stdout
