"""From a name to a folder without a network: a fake cache, a fake hub, and its every error."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import huggingface_hub.constants
import lying_hub
import pytest
from checkpoints import Spec, write
from huggingface_hub import errors, file_download
from loaded import network_of, refused
from processes import python

from minikv.models.hub import resolve

REPO = "owner/some-model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def put_in_cache(
    cache: Path, files: dict[str, bytes], commit: str = COMMIT, ref: str | None = "main"
) -> Path:
    """The hub's own layout: blobs, and a snapshot of links into them."""
    root = cache / "models--owner--some-model"
    snapshot = root / "snapshots" / commit
    snapshot.mkdir(parents=True, exist_ok=True)
    (root / "blobs").mkdir(exist_ok=True)
    (root / "refs").mkdir(exist_ok=True)
    if ref:
        (root / "refs" / ref).write_text(commit)
    for name, data in files.items():
        blob = root / "blobs" / f"{commit[:4]}-{name}"
        blob.write_bytes(data)
        (snapshot / name).unlink(missing_ok=True)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, no offline setting from outside, and a network that must not be used."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    for name in ("HfApi", "snapshot_download"):
        forbidden = Mock(side_effect=lambda *_, **__: pytest.fail("touched the network"))
        monkeypatch.setattr(huggingface_hub, name, forbidden)
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A small sharded model with a tokenizer file. It is made before a test takes the hub away:
    transformers looks for it when it is imported."""
    folder = tmp_path_factory.mktemp("model")
    write(Spec(layout="sharded"), folder)
    (folder / "tokenizer.json").write_text("{}")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def files(written: dict[str, bytes]) -> dict[str, bytes]:
    return dict(written)


class FakeHub:
    """Serves `files` into `cache`, and records what was asked for."""

    def __init__(self, patch: pytest.MonkeyPatch, cache: Path, files: dict[str, bytes]) -> None:
        self.cache, self.files = cache, files
        self.asked: list[str] = []
        self.revisions: list[str | None] = []
        patch.setattr(huggingface_hub, "HfApi", lambda: self)
        patch.setattr(huggingface_hub, "snapshot_download", self.download)

    def model_info(self, repo: str, revision: str | None = None) -> Any:
        assert repo == REPO
        self.revisions.append(revision)
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.files])

    def download(self, repo: str, *, revision: str | None = None, allow_patterns: list[str]) -> str:
        self.asked = allow_patterns
        chosen = {name: self.files[name] for name in allow_patterns}
        return str(put_in_cache(self.cache, chosen, ref=revision or "main"))


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, bytes]], FakeHub]:
    """Serves files."""
    return partial(FakeHub, monkeypatch, cache)


def without(files: dict[str, bytes], lost: str) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name != lost}


def test_a_directory_is_used_as_it_is_and_a_file_is_not_a_model(
    tmp_path: Path, cache: Path
) -> None:
    source = resolve(str(tmp_path))
    assert (source.folder, source.revision) == (tmp_path, None)
    assert resolve(tmp_path).folder == tmp_path
    (tmp_path / "model.safetensors").write_bytes(b"x")
    refused(lambda: resolve(str(tmp_path / "model.safetensors")), "is a file, not a model", code=3)


NAMES = ("/no/such/model", "./model", "../model", "~/no-such-model", "model", "a/b/c", "", "-x/y")
NAMES += ("C:\\models\\x", "owner/..", "owner/na me", "owner/na\nme", "~nobody-at-all/x", "\0")
NAMES += ("a" * 5000, "a/" + "b" * 5000)
REVISIONS = ("../../../etc/passwd", "", "a b", "-x", "\x1b[0m", "/main")


@pytest.mark.parametrize(
    ("name", "revision", "said"),
    [
        *((name, None, "not found") for name in (*NAMES, Path(REPO))),
        *((REPO, revision, "is not a revision") for revision in REVISIONS),
    ],
)
def test_what_is_no_directory_and_no_hub_id_never_reaches_the_network(
    name: str | Path, revision: str | None, said: str, cache: Path
) -> None:
    refused(lambda: resolve(name, revision=revision), said, code=3)


def test_a_gguf_file_is_found_by_its_path_and_by_its_form(tmp_path: Path, hub: Any) -> None:
    file = tmp_path / "Model.GGUF"
    file.write_bytes(b"GGUF")
    for name in (str(file), file, str(tmp_path), tmp_path):
        assert resolve(name).folder == file
    names = ["README.md", "A-Q4_K_M.gguf", "A-Q4_K_S.gguf", "A.q8_0.gguf", "mmproj-A-f16.gguf"]
    fake = hub({name: name.encode() for name in names})
    error = refused(lambda: resolve(REPO), "4 GGUF files")
    assert "owner/name:" in error.hint
    error = refused(lambda: resolve(f"{REPO}:Q4"))
    assert str(error) == "no GGUF files end in 'Q4'"
    assert "A-Q4_K_M.gguf" in error.hint
    assert fake.asked == []
    for form, name in (("Q4_K_M", names[1]), ("q4_k_s", names[2]), ("Q8_0", names[3])):
        source = resolve(f"{REPO}:{form}")
        assert source.folder.read_bytes() == name.encode()
        assert fake.asked == [name]
        assert source.revision == source.folder.parent.name
        assert resolve(f"{REPO}:{form}", offline=True) == source
    # Beside a model it is one of the files that are not read.
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)).folder == tmp_path


def test_a_cached_model_needs_no_network(cache: Path, files: dict[str, bytes]) -> None:
    snapshot = put_in_cache(cache, files)
    source = resolve(REPO)
    assert (source.name, source.folder, source.revision) == (REPO, snapshot, COMMIT)
    assert resolve(REPO, offline=True) == source
    assert resolve(REPO, revision=COMMIT) == source
    # The links into blobs/ are followed: this is how every real cache looks.
    network_of(source.folder)


def test_offline_says_what_is_missing(cache: Path, files: Any, monkeypatch: Any) -> None:
    error = refused(lambda: resolve(REPO, offline=True), "not in the local cache", code=3)
    assert "`offline=True`" in error.hint
    # Another program may have let a hub that lies make a snapshot of another name.
    put_in_cache(cache, files, commit="not-a-commit")
    refused(lambda: resolve(REPO, offline=True), "not in the local cache")
    shard = next(name for name in files if name.startswith("model-"))
    put_in_cache(cache, without(files, shard))
    assert shard in str(refused(lambda: resolve(REPO, offline=True)))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused(lambda: resolve(REPO), "offline")
    refused(lambda: resolve(REPO, revision="nope"), "nope")


@pytest.mark.parametrize("lost", ["config.json", "tokenizer.json", "model.safetensors.index.json"])
def test_a_partly_cached_model_is_completed_from_the_network(
    lost: str, cache: Path, files: dict[str, bytes], hub: Any
) -> None:
    put_in_cache(cache, without(files, lost))
    fake = hub(files)
    assert resolve(REPO).revision == COMMIT
    assert lost in fake.asked


NOISE = """
    README.md consolidated.safetensors pytorch_model.bin original/consolidated.00.pth modeling_x.py
    model.safetensors adapter_model.safetensors onnx/model.onnx
"""


def test_only_the_needed_files_are_fetched(files: Any, hub: Any, monkeypatch: Any) -> None:
    fake = hub(files | dict.fromkeys(NOISE.split(), b"") | {"params.json": b"{}"})
    source = resolve(REPO, revision="v2")
    assert set(fake.asked) == {*files, "params.json"}
    assert fake.revisions == ["v2"]
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: pytest.fail("asked again"))
    assert resolve(REPO, revision="v2") == source


@pytest.mark.parametrize(
    ("names", "word"),
    [
        (["config.json", "pytorch_model.bin"], "pickled"),
        (["config.json", "model.gguf"], "GGUF"),
        (["config.json"], "no weights"),
        (["model.safetensors"], "config.json"),
        ([], "no weights"),
    ],
)
def test_repositories_without_usable_weights_are_refused_before_the_download(
    names: list[str], word: str, files: dict[str, bytes], hub: Any
) -> None:
    fake = hub(dict.fromkeys(names, b""))
    refused(lambda: resolve(REPO), word, code=3)
    assert fake.asked == []
    hub(without(files, "tokenizer.json"))
    refused(lambda: resolve(REPO), "tokenizer.json")


def http(kind: type[Exception], status: int) -> Exception:
    error = kind.__new__(kind)
    Exception.__init__(error, "secret token hf_abc in here")
    error.response = SimpleNamespace(status_code=status, headers={})  # type: ignore[attr-defined]
    return error


FAILURES: list[tuple[str, Callable[[], Exception], str]] = [
    ("gated", lambda: http(errors.GatedRepoError, 403), "gated"),
    ("absent or private", lambda: http(errors.RepositoryNotFoundError, 404), "no such model"),
    ("revision", lambda: http(errors.RevisionNotFoundError, 404), "no revision 'v9'"),
    ("disabled", lambda: http(errors.DisabledRepoError, 403), "disabled"),
    ("server", lambda: http(errors.HfHubHTTPError, 503), "503"),
    ("vanished", lambda: http(errors.RemoteEntryNotFoundError, 404), "vanished"),
    ("unreachable", lambda: errors.LocalEntryNotFoundError("x"), "cannot be reached"),
    ("incomplete", lambda: errors.IncompleteSnapshotError("x", "y"), "cannot be reached"),
    ("switched off", lambda: errors.OfflineModeIsEnabled("x"), "offline"),
    ("bad id", lambda: errors.HFValidationError("x"), "valid hub id"),
    ("disk full", lambda: OSError(errno.ENOSPC, "x"), "disk is full"),
    ("connection", lambda: ConnectionError("hf_abc"), "download failed"),
    ("anything", lambda: RuntimeError("hf_abc"), "download failed"),
]


@pytest.mark.parametrize("during", ["info", "download"])
@pytest.mark.parametrize(("make", "word"), [f[1:] for f in FAILURES], ids=[f[0] for f in FAILURES])
def test_every_failure_of_the_hub_in_plain_words(
    make: Any, word: str, during: str, files: dict[str, bytes], hub: Any, monkeypatch: Any
) -> None:
    fake, fail = hub(files), Mock(side_effect=make())
    if during == "info":
        monkeypatch.setattr(fake, "model_info", fail)
    else:
        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    error = refused(lambda: resolve(REPO, revision="v9"), word, code=3)
    assert "hf_abc" not in str(error) + error.hint


def test_an_interrupt_passes_through(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        resolve(REPO)


OFFLINE = """
import os, socket, sys
def forbidden(*args, **kwargs):
    raise AssertionError("touched the network")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = forbidden
from minikv.models.hub import resolve
assert "huggingface_hub" not in sys.modules
source = resolve(sys.argv[1], offline=True)
import huggingface_hub
assert huggingface_hub.constants.HF_HUB_OFFLINE
print(source.revision)
"""


def printed(code: str, given: str, **environment: str) -> str:
    """What a program prints in a process without other settings of the library."""
    done = python("-c", code, given, without=("HF_",), **environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" or code is not OFFLINE
    return done.stdout


def test_offline_is_set_before_the_library_is_imported(tmp_path: Path, files: Any) -> None:
    put_in_cache(tmp_path, files)
    assert printed(OFFLINE, REPO, HF_HUB_CACHE=str(tmp_path)).strip() == COMMIT


GOOD = "ab" * 20
PLAIN = {"config.json": b"{}", "tokenizer.json": b"{}", "chat_template.jinja": b"x"}
PLAIN |= {"model.safetensors": b"weights"}
UP = "../" * 6
LIES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "commit up": {"sha": UP + "outside/commit"},
    "commit absolute": {"sha": "{out}/commit"},
    "commit beside": {"sha": "../../models--owner--other/snapshots/x"},
    "commit of dots": {"sha": ".."},
    "commit with a letter more": {"sha": GOOD + "g"},
    "commit in capitals": {"sha": GOOD.upper()},
    "file's commit up": {"commit": UP + "outside/commit"},
    "file's commit within": {"commit": "x/../y"},
    "file's commit absolute": {"commit": "{out}/commit"},
    "checksum up": {"etags": {"config.json": UP + "outside/blob"}},
    "checksum absolute": {"etags": {"model.safetensors": "{out}/blob"}},
    "checksum of a file that exists": {"etags": {"config.json": "{out}/secret"}},
    "checksum in a folder": {"etags": {"tokenizer.json": "x/y"}},
    "checksum of dots": {"etags": {"tokenizer.json": ".."}},
    "checksum in the list": {"etags": {"model.safetensors": "{out}/blob"}, "xet": True},
    "commit of an absent file": {"absent": {"tokenizer.json": "{out}/absent"}},
    "names up": {"listed": (UP + "outside/x.json", "../config.json", "a/../../tokenizer.json")},
    "names absolute": {"listed": ("{out}/config.json", "//config.json", "\\..\\tokenizer.json")},
}
ASK = """
import json, pathlib, sys
from minikv.models import hub
from minikv.models.errors import ModelError

class Quiet:
    def __getattr__(self, name):
        return lambda *facts: None

for name in json.loads(sys.argv[1]):
    for act in (hub.configuration, hub.resolve, lambda name: hub.resolve(name, progress=Quiet())):
        try:
            act(name)
            print(name, "done", sep="|")
        except ModelError as error:
            print(name, type(error).__name__, error, sep="|")
"""


@pytest.fixture(scope="module")
def lied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, set[str]]]:
    """The folder in which the cache is, and what each lie led to. The library is the real one."""
    place = tmp_path_factory.mktemp("lies")
    (place / "outside").mkdir()
    (place / "outside/secret").write_text("mine")
    lies = json.loads(json.dumps(LIES).replace("{out}", str(place / "outside")))
    repos = {
        f"owner/lie-{n}": lying_hub.Repo(**{"files": PLAIN, "sha": GOOD, "commit": GOOD} | lie)
        for n, lie in enumerate(lies.values())
    }
    with lying_hub.serving(repos) as address:
        home = {"HF_ENDPOINT": address, "HF_HOME": str(place / "a/b/home"), "NO_PROXY": "*"}
        out = printed(ASK, json.dumps([*repos]), **home)
    told: dict[str, set[str]] = {name: set() for name in LIES}
    for line in out.splitlines():
        repo, _, rest = line.partition("|")
        told[[*LIES][[*repos].index(repo)]].add(rest)
    return place, told


@pytest.mark.parametrize("name", LIES)
def test_a_hub_that_lies_is_caught(name: str, lied: tuple[Path, dict[str, set[str]]]) -> None:
    told = lied[1][name]
    if name in ("nothing", "names up", "names absolute"):
        assert told == {"done"}  # such a file is not fetched
    elif name == "commit of an absent file":
        assert {"vanished" in line for line in told - {"done"}} == {True}
    else:
        caught = [line for line in told if "is not hexadecimal" in line]
        assert caught
        assert all(line.startswith("CorruptModel|") for line in caught)
        assert all("is not hexadecimal" in line for line in told - {"done"})


def test_a_hub_that_lies_writes_nothing_outside_of_the_cache(lied: Any) -> None:
    place = lied[0]
    cache = place / "a/b/home/hub"
    own = (cache, cache.parent / "xet")  # the library writes a log
    found = [path for path in place.rglob("*") if not any(map(path.is_relative_to, own))]
    kept = {"a", "a/b", "a/b/home", "outside", "outside/secret"}
    assert {str(path.relative_to(place)) for path in found} == kept
    assert (place / "outside/secret").read_text() == "mine"
    for path in cache.rglob("*"):
        assert path.resolve().is_relative_to(cache), path
    for repo in cache.glob("models--*"):
        assert {path.name for path in repo.glob("snapshots/*")} <= {GOOD}
        assert {path.read_text() for path in repo.glob("refs/*")} <= {GOOD}
        assert not (repo / ".no_exist").exists()
        assert all(set(path.name) <= {*"0123456789abcdef"} for path in repo.glob("blobs/*"))


def test_a_library_that_cannot_be_checked_fetches_nothing(
    files: dict[str, bytes], hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = hub(files)
    monkeypatch.delattr(file_download, "_get_metadata_or_catch_error")
    refused(lambda: resolve(REPO), "this version of huggingface-hub")
    assert fake.asked == []


LOST = ("chat_template.jinja", "generation_config.json", "tokenizer_config.json")


@pytest.mark.parametrize("lost", [*LOST, "model-00001-of-00002.safetensors"])
def test_a_link_to_a_file_that_never_came_means_an_unfinished_download(
    lost: str, cache: Path, files: dict[str, bytes], hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = put_in_cache(cache, files)
    never = snapshot.parent.parent / "blobs/never"
    (snapshot / "README.md").symlink_to("../../blobs/readme")  # which is not needed
    assert resolve(REPO, offline=True).folder == snapshot
    (snapshot / lost).unlink(missing_ok=True)
    (snapshot / lost).symlink_to(never)
    refused(lambda: resolve(REPO, offline=True), f"only partly in the local cache ({lost} missing)")
    refused(lambda: resolve(snapshot), f"{lost} in ", code=3)
    hub(files)

    def fetched(*_: object, **__: object) -> str:
        never.write_bytes(b"x")
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    assert resolve(REPO).folder == snapshot
