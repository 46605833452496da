"""`minikv models`: what is on this disk, a download, a removal. No network."""

# ruff: noqa: F401, F811 (fixtures that another file has)
from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tables import table
from test_hub import REPO, FakeHub, cache, files, put_in_cache, written
from typed import fails, invoke

run = partial(invoke, "models")


def rows(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in text.splitlines()[1:]}


def test_models_have_a_size_and_a_state(cache: Path, files: dict[str, bytes]) -> None:
    """The bundled one is always there."""
    result = run()
    fails(result, 0, f"no models in {cache}")
    assert rows(result.stdout)["bundled"][1:] == ["MiB", "-", "ready"]
    os.rmdir(cache)
    assert list(rows(run().stdout)) == ["bundled"]
    put_in_cache(cache, files)
    size = sum(map(len, files.values()))
    assert rows(run().stdout)[REPO] == [f"{size / 1024:.1f}", "KiB", "-", "ready"]
    (cache / "datasets--a--b" / "snapshots" / ("0" * 40)).mkdir(parents=True)
    assert [*rows(run().stdout)] == ["bundled", REPO]  # models only
    shard = next(name for name in files if name.endswith(".safetensors"))
    (put_in_cache(cache, files) / shard).unlink()
    assert f"{shard} is missing" in run().stdout
    config = json.loads(files["config.json"]) | {"model_type": "whisper", "architectures": ["W"]}
    shutil.rmtree(cache / "models--owner--some-model")
    put_in_cache(cache, {**files, "config.json": json.dumps(config).encode()})
    assert "not supported: " in run().stdout
    assert "whisper" in run().stdout


def test_pull_fetches_only_what_is_needed(
    cache: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = {**files, "README.md": b"x", "pytorch_model.bin": b"x"}
    hub = Sized(monkeypatch, cache, served)
    fails(invoke("config", "set", "aliases.mine", REPO), 0)
    result = run("pull", "mine")
    assert result.exit_code == 0, result.stderr
    folder = Path(result.stdout.strip())
    assert sorted(os.listdir(folder)) == sorted(files)
    assert "README.md" not in hub.asked
    assert (f"{REPO}: " in result.stderr, "ready" in result.stderr) == (True, True)
    hub.asked = []
    again = run("pull", REPO)  # from the cache
    assert (again.stdout, hub.asked) == (result.stdout, [])


class Sized(FakeHub):
    """A hub that is asked for sizes and reports the progress of a download."""

    def model_info(self, repo: str, revision: str | None = None, **more: object) -> object:
        return super().model_info(repo, revision)

    def download(self, repo: str, *, tqdm_class: object = None, **given: Any) -> str:
        return super().download(repo, **given)


@table("""
    name    | code | said
    bundled | 2    | part of minikv
    .       | 2    | is here already
    nosuch  | 3    | not found
    a/b/c   | 3    | not found
""")
def test_pull_refuses_what_is_no_model(cache: Path, name: str, code: str, said: str) -> None:
    result = run("pull", name)
    fails(result, int(code), said)
    assert result.stdout == ""


def test_rm_removes_all_of_a_model(cache: Path, files: dict[str, bytes]) -> None:
    put_in_cache(cache, files)
    put_in_cache(cache, files, commit="f" * 40, ref="older")
    fails(run("rm", "owner/some-modl", "--yes"), 2, f"did you mean {REPO}?")
    fails(run("rm", REPO, "bundled", "-y"), 2)
    fails(run("rm", REPO), 2, "--yes removes without asking")
    assert (cache / "models--owner--some-model").is_dir()
    fails(run("rm", REPO, "--yes"), 0, f"removed {REPO}")
    assert not (cache / "models--owner--some-model").exists()
    assert run("rm", REPO, "--yes").exit_code == 2


def test_rm_removes_one_gguf_file_and_with_the_last_the_model(cache: Path) -> None:
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
