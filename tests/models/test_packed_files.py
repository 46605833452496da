"""Where packed weights are, whose they are, and that a listing survives whatever lies there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minikv.models import packed_files
from minikv.models.packed_files import clear, listed, of_model, remove, store


def put(number: int, model: str, folder: str = "/nowhere", size: int = 1000) -> Path:
    """A file as `packed.write` makes it, but for its numbers."""
    about = {"format": packed_files.FORMAT, "model": model, "folder": folder}
    text = json.dumps({"__metadata__": about}).encode()
    path = store() / f"{number:032x}-int8.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((len(text).to_bytes(8, "little") + text).ljust(size, b"x"))
    return path


def test_they_are_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MINIKV_HOME", str(tmp_path / "home"))
    assert store() == tmp_path / "home" / "cache" / "packed"
    monkeypatch.delenv("MINIKV_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert store() == tmp_path / "xdg" / "minikv" / "packed"
    assert listed() == []


def test_without_a_home_directory_there_is_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor anything in it, and nothing to remove."""

    class Homeless:
        def __init__(self, name: str) -> None:
            pass

        @property
        def user_cache_path(self) -> Path:
            raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("platformdirs.unix.Unix", Homeless)
    for home in ("", "~no-such-user/minikv"):
        monkeypatch.setenv("MINIKV_HOME", home)
        with pytest.raises(FileNotFoundError, match="there is no home directory"):
            store()
    assert listed() == []
    clear()


@pytest.mark.parametrize("umask", [0, 0o022, 0o377])
def test_folders_that_are_made_are_the_users_alone(tmp_path: Path, umask: int) -> None:
    (there := tmp_path / "there").mkdir()
    there.chmod(0o755)
    before = os.umask(umask)
    try:
        packed_files.make(there / "a" / "b")
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o777 for path in (there, there / "a", there / "a" / "b")]
    assert modes == [0o755, 0o700, 0o700]
    packed_files.make(there / "a" / "b")  # which is there
    (there / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        packed_files.make(there / "file")


def test_the_listing_names_models_and_passes_over_what_is_odd(tmp_path: Path) -> None:
    put(2, "owner/two")
    put(1, "owner/one", str(tmp_path))
    odd = put(3, "x")
    odd.write_bytes(b"\xff" * 8)
    (store() / "note.txt").write_text("mine")
    (store() / f"{9:032x}-int8.safetensors").symlink_to("/nowhere/at/all")
    os.mkfifo(store() / f"{8:032x}-int8.safetensors")
    assert [(one.model, one.bytes) for one in listed()] == [
        ("owner/one", 1000),
        ("owner/two", 1000),
        ("", 8),
    ]
    assert [one.model for one in of_model("owner/two")] == ["owner/two"]
    assert [one.model for one in of_model(str(tmp_path / "x" / ".."))] == ["owner/one"]
    assert [one.path for one in of_model(odd.name)] == [odd]
    assert remove(of_model("owner/two")) == 1000
    assert remove([*listed(), *listed()]) == 1008  # what is gone already counts once
    assert os.listdir(store()).count("note.txt") == 1


def test_what_a_killed_process_left_goes_and_what_is_written_stays() -> None:
    put(1, "m")
    old, pipe, live = (store() / f".{n:032x}-int4+head.0a1b2c3d.part" for n in range(3))
    os.mkfifo(pipe)
    for path in (old, live):
        path.write_text("")
    for path in (old, pipe):
        os.utime(path, (time.time() - 4000,) * 2)
    clear()
    assert [path.exists() for path in (old, pipe, live)] == [False, True, True]


def test_a_directory_is_found_by_its_path_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here := tmp_path / "one" / "model").mkdir(parents=True)
    (there := tmp_path / "two" / "owner" / "name").mkdir(parents=True)
    own, other = put(1, str(here), str(here)), put(2, str(there), str(there))
    hub = put(3, "owner/name", "/cache/of/the/hub")
    monkeypatch.chdir(tmp_path / "one")
    assert [one.path for one in of_model("./model")] == [own]
    monkeypatch.chdir(tmp_path)
    assert of_model(".") == of_model("./model") == []
    monkeypatch.chdir(there)
    assert [one.path for one in of_model(".")] == [other]
    assert of_model("") == []
    monkeypatch.chdir(tmp_path / "two")
    assert [one.path for one in of_model("owner/name")] == [hub]
    assert [one.path for one in of_model("./owner/name")] == [other]


@pytest.mark.parametrize("module", ["packed_files", "errors", "limits"])
def test_some_need_no_torch(module: str) -> None:
    code = f"import sys, minikv.models.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
