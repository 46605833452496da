"""Checksums of a model's files, and what the hub says they are."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from minikv.models import BUNDLED, digests
from minikv.models.digests import Digest, digest, names, shipped, stated
from minikv.models.errors import ModelError, ModelUnavailable


def test_the_bundled_model_is_as_its_list_says() -> None:
    """`listed` in models/digests.py writes the list; models/bundled/train.py calls it."""
    assert (BUNDLED / digests.STATED).read_text() == digests.listed(BUNDLED)
    assert set(shipped(BUNDLED)) == set(names(BUNDLED))


def test_gits_checksum_is_gits(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"what is up, doc?")  # the example of git's own book
    assert digest(path, "git").value == "bd9dbf5aae1a3862dd1526723246b20206e5fc37"
    assert digest(path, "sha256").value == hashlib.sha256(path.read_bytes()).hexdigest()


def test_what_the_hub_says_is_the_name_of_the_blob(tmp_path: Path) -> None:
    """64 hexadecimal digits are a SHA-256, 40 git's; anything else says nothing."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots").mkdir()
    folder = tmp_path / "snapshots"
    kinds = {"a" * 64: "sha256", "b" * 40: "git", "c" * 39: None, "Z" * 40: None}
    for target, kind in kinds.items():
        name = f"{target[:5]}.json"
        (folder / name).symlink_to(f"../blobs/{target}")
        assert stated(folder, name) == (Digest(kind, target) if kind else None)
    (folder / "plain.json").write_text("{}")
    (folder / "other.json").symlink_to(f"../elsewhere/{'a' * 64}")
    assert stated(folder, "plain.json") is stated(folder, "other.json") is None


def test_shards_that_only_the_index_names_are_among_the_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-00001-of-00002.safetensors", '
        '"b": "model-00002-of-00002.safetensors"}}'
    )
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    (tmp_path / "README.md").write_text("not read")
    found = names(tmp_path)
    assert "model-00002-of-00002.safetensors" in found
    assert "README.md" not in found
    (tmp_path / "model.safetensors.index.json").write_text("{")  # its own checksum tells that
    assert "model.safetensors.index.json" in names(tmp_path)


def test_a_file_that_the_system_cannot_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/proc/self/mem is a regular file whose first byte gives EIO."""
    link = tmp_path / "model.safetensors"
    link.symlink_to("/proc/self/mem")
    with pytest.raises(ModelUnavailable, match=os.strerror(errno.EIO)):
        digest(link, "sha256")


def test_git_agrees(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(os.urandom(1000))
    try:
        said = subprocess.run(
            ["git", "hash-object", "--no-filters", str(path)], capture_output=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs git")
    assert digest(path, "git").value == said.stdout.decode().strip()


def test_a_folder_that_cannot_be_listed_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(folder: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(ModelError, match=os.strerror(errno.EACCES)) as caught:
        names(tmp_path)
    assert caught.value.exit_code == 3
