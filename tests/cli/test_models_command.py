"""`minikv models`: what is on this disk, a download, a removal. No network."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from test_hub import REPO, FakeHub, cache, files, put_in_cache, written  # noqa: F401
from typer.testing import CliRunner, Result

from minikv.cli.main import app
from minikv.models import packed_files


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIKV_HOME", str(tmp_path / "home"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["models", *arguments])


def rows(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in text.splitlines()[1:]}


def test_the_bundled_model_is_always_there(cache: Path) -> None:  # noqa: F811
    result = run()
    assert result.exit_code == 0
    assert rows(result.stdout)["bundled"][1:] == ["MiB", "-", "-", "ready"]
    assert f"no models in {cache}" in result.stderr
    os.rmdir(cache)
    assert list(rows(run().stdout)) == ["bundled"]


def test_cached_models_have_their_size_and_whether_they_load(
    cache: Path,  # noqa: F811
    files: dict[str, bytes],  # noqa: F811
) -> None:
    put_in_cache(cache, files)
    size = sum(map(len, files.values()))
    (one,) = [row for row in json.loads(run("--json").stdout) if row["name"] == REPO]
    assert (one["bytes"], one["state"]) == (size, "ready")
    assert rows(run().stdout)[REPO][-1] == "ready"
    (cache / "datasets--a--b" / "snapshots" / ("0" * 40)).mkdir(parents=True)
    assert len(json.loads(run("--json").stdout)) == 2  # models only
    shard = next(name for name in files if name.endswith(".safetensors"))
    (put_in_cache(cache, files) / shard).unlink()
    assert f"{shard} is missing" in run().stdout


def test_a_model_that_minikv_cannot_load_says_so(
    cache: Path,  # noqa: F811
    files: dict[str, bytes],  # noqa: F811
) -> None:
    config = json.loads(files["config.json"]) | {"model_type": "whisper", "architectures": ["W"]}
    put_in_cache(cache, {**files, "config.json": json.dumps(config).encode()})
    assert "not supported: " in run().stdout
    assert "whisper" in run().stdout


def test_pull_fetches_only_what_is_needed(
    cache: Path,  # noqa: F811
    files: dict[str, bytes],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    served = {**files, "README.md": b"x", "pytorch_model.bin": b"x"}
    hub = Sized(monkeypatch, cache, served)
    (tmp_path / "home").mkdir()
    (tmp_path / "home/config.toml").write_text(f'[aliases]\nmine = "{REPO}"\n')
    result = run("pull", "mine")
    assert result.exit_code == 0, result.stderr
    folder = Path(result.stdout.strip())
    assert sorted(os.listdir(folder)) == sorted(files)
    assert "README.md" not in hub.asked
    assert f"{REPO}: " in result.stderr
    assert "ready" in result.stderr
    hub.asked = []
    again = run("pull", REPO)  # from the cache
    assert (again.stdout, hub.asked) == (result.stdout, [])


class Sized(FakeHub):
    """A hub that is watched."""

    def model_info(self, repo: str, revision: str | None = None, **more: object) -> object:
        return super().model_info(repo, revision)

    def download(self, repo: str, **given: object) -> str:
        given.pop("tqdm_class", None)
        return super().download(repo, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("bundled", 2, "part of minikv"),
        (".", 2, "is here already"),
        ("nosuch", 3, "not found"),
        ("a/b/c", 3, "not found"),
    ],
)
def test_pull_refuses_what_is_no_model_of_the_hub(
    cache: Path,  # noqa: F811
    name: str,
    code: int,
    said: str,
) -> None:
    result = run("pull", name)
    assert result.exit_code == code
    assert said in result.stderr
    assert result.stdout == ""


def test_rm_removes_all_of_a_model_and_names_the_nearest(
    cache: Path,  # noqa: F811
    files: dict[str, bytes],  # noqa: F811
) -> None:
    put_in_cache(cache, files)
    put_in_cache(cache, files, commit="f" * 40, ref="older")
    result = run("rm", "owner/some-modl", "--yes")
    assert result.exit_code == 2
    assert f"did you mean {REPO}?" in result.stderr
    assert run("rm", REPO, "bundled", "-y").exit_code == 2
    result = run("rm", REPO)
    assert result.exit_code == 2
    assert "--yes removes without asking" in result.stderr
    assert (cache / "models--owner--some-model").is_dir()
    result = run("rm", REPO, "--yes")
    assert result.exit_code == 0
    assert f"removed {REPO}" in result.stderr
    assert not (cache / "models--owner--some-model").exists()
    assert run("rm", REPO, "--yes").exit_code == 2


def test_rm_removes_one_gguf_file_and_with_the_last_the_model(cache: Path) -> None:  # noqa: F811
    some = {"A-Q4_0.gguf": b"GGUF4", "A-Q8_0.gguf": b"GGUF", "x.md": b""}
    put_in_cache(cache, {**some, "A-Q4_0.gguf": b"GGUF4, older"}, commit="f" * 40, ref="older")
    snapshot = put_in_cache(cache, some)
    root = snapshot.parents[1]
    assert "did you mean" in run("rm", f"{REPO}:Q4_1", "--yes").stderr
    assert run("rm", f"{REPO}:Q4_0", "--yes").exit_code == 0
    assert {path.name for path in snapshot.iterdir()} == {"A-Q8_0.gguf", "x.md"}
    assert not [path for path in (root / "blobs").iterdir() if "Q4_0" in path.name]
    assert f"{REPO}:Q8_0" in run().stdout
    assert f"removed {REPO}:Q8_0" in run("rm", f"{REPO}:Q8_0", "--yes").stderr
    assert not root.exists()


def put_packed(model: str, folder: Path, size: int = 3 << 20) -> Path:
    about = {"__metadata__": {"model": model, "folder": str(folder)}}
    text = json.dumps(about).encode()
    key = hashlib.sha256(text).hexdigest()[:32]
    path = packed_files.store() / f"{key}-int8.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((len(text).to_bytes(8, "little") + text).ljust(size, b"x"))
    return path


def test_packed_weights_are_shown_and_removed_with_their_model(
    cache: Path,  # noqa: F811
    files: dict[str, bytes],  # noqa: F811
    tmp_path: Path,
) -> None:
    put_in_cache(cache, files)
    (own := tmp_path / "own").mkdir()
    packed, other = put_packed(REPO, tmp_path), put_packed(str(own), own)
    gone = put_packed("gone", tmp_path / "gone")
    result = run()
    assert result.stdout.splitlines()[0].split() == ["NAME", "SIZE", "PACKED", "FORM", "STATE"]
    table = rows(result.stdout)
    assert table[REPO][2:] == ["3.0", "MiB", "-", "ready"]
    assert table["bundled"][2:] == ["-", "-", "ready"]
    assert table[str(own)][2:] == ["3.0", "MiB", "-", "in", "its", "own", "folder"]
    assert "gone; packed weights only" in result.stdout
    by_name = {row["name"]: row["packed"] for row in json.loads(run("--json").stdout)}
    assert by_name == {"bundled": 0, REPO: 3 << 20, str(own): 3 << 20, "gone": 3 << 20}
    result = run("rm", REPO, "--yes")
    assert result.exit_code == 0, result.stderr
    assert not packed.exists()
    assert not (cache / "models--owner--some-model").exists()
    assert other.exists()
    result = run("rm", str(own))
    assert result.exit_code == 2  # it asks first
    assert other.exists()
    result = run("rm", str(own), "gone", "--yes")
    assert result.exit_code == 0, result.stderr
    assert f"removed the packed weights of {own}" in result.stderr
    assert own.is_dir()
    assert not other.exists()
    assert not gone.exists()
    assert run("rm", str(own), "--yes").exit_code == 2


def test_directories_of_one_name_have_a_line_each_and_leave_alone(
    cache: Path,  # noqa: F811
    files: dict[str, bytes],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_in_cache(cache, files)
    kept = {}
    for name in ("one", "two", REPO):
        (place := tmp_path / name / "model").mkdir(parents=True)
        kept[name] = put_packed(str(place), place)
    beside = put_packed(str(tmp_path / REPO), tmp_path / REPO)
    names = {row["name"] for row in json.loads(run("--json").stdout)}
    assert {str(tmp_path / name / "model") for name in kept} < names
    monkeypatch.chdir(tmp_path / "one")
    assert run("rm", ".", "--yes").exit_code == 2
    assert run("rm", "./model", "--yes").exit_code == 0
    assert [path.exists() for path in kept.values()] == [False, True, True]
    monkeypatch.chdir(tmp_path)
    assert run("rm", REPO, "--yes").exit_code == 0  # the one of the cache
    assert beside.exists()


def test_folders_that_cannot_be_read_do_not_end_the_listing(
    cache: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    (links := tmp_path / "links").mkdir()
    (links / "one.safetensors").symlink_to("/nowhere/at/all")
    (links / "two.safetensors").write_bytes(b"x" * 10)
    put_packed(str(links), links)
    os.mkfifo(packed_files.store() / f"{'f' * 32}-int8.safetensors")
    result = run("--json")
    assert result.exit_code == 0, result.output
    found = {row["name"]: (row["bytes"], row["state"]) for row in json.loads(result.stdout)[1:]}
    assert found == {str(links): (10, "in its own folder")}


def test_rm_leaves_no_parts_of_killed_writers(cache: Path, tmp_path: Path) -> None:  # noqa: F811
    path = put_packed("gone", tmp_path / "gone")
    part = path.with_name(f".{path.stem}.0a1b2c3d.part")
    part.write_text("")
    os.utime(part, (0, 0))
    assert run("rm", "gone", "--yes").exit_code == 0
    assert os.listdir(path.parent) == []
