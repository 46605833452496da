"""Files of other programs are found where these programs put them, and nowhere else."""

from __future__ import annotations

import json
import sys
from functools import partial
from importlib import invalidate_caches
from pathlib import Path

import pytest
from loaded import refused

from minikv.models import places
from minikv.models.hub import resolve


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "packages"), *sys.path])
    return tmp_path


def pulled(root: Path, *parts: str, digest: str = "ab" * 32, kind: str = "model") -> Path:
    """A model as `ollama pull` leaves it."""
    manifest, blob = root.joinpath("manifests", *parts), root / "blobs" / f"sha256-{digest}"
    for path in (manifest, blob):
        path.parent.mkdir(parents=True, exist_ok=True)
    layer = {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digest}"}
    other = {"mediaType": "application/vnd.ollama.image.license", "digest": f"sha256:{'0' * 64}"}
    manifest.write_text(json.dumps({"layers": [other, layer]}))
    blob.write_bytes(digest.encode())
    return blob


HOST = "registry.ollama.ai"


def test_models_of_ollama_are_read_in_place(home: Path) -> None:
    root = home / ".ollama" / "models"
    names = {
        "ollama:llama3.2:latest": pulled(root, HOST, "library", "llama3.2", "latest"),
        "ollama:llama3.2:1b": pulled(root, HOST, "library", "llama3.2", "1b", digest="cd" * 32),
        "ollama:someone/tiny:q4": pulled(root, HOST, "someone", "tiny", "q4", digest="ef" * 32),
        "ollama:hf.co/a/b:Q4_K_M": pulled(root, "hf.co", "a", "b", "Q4_K_M", digest="12" * 32),
    }
    pulled(root, HOST, "library", "embedder", "latest", kind="adapter")
    assert dict(places.listed()) == names
    for name, blob in names.items():
        assert resolve(name).folder == blob
    assert resolve("ollama:llama3.2").folder == names["ollama:llama3.2:latest"]
    for word, *others in (
        ("not a name of ollama", "", "../../etc:passwd", "llama3.2:.."),
        ("not among ollama's models", "gone"),
        ("names no existing file", "embedder"),
    ):
        for name in others:
            error = refused(partial(resolve, f"ollama:{name}"), word)
            assert error.exit_code in (3, 6)


def test_a_manifest_names_no_file_elsewhere(home: Path) -> None:
    root = home / ".ollama" / "models"
    pulled(root, HOST, "library", "bad", "latest")
    manifest = root.joinpath("manifests", HOST, "library", "bad", "latest")
    (root / "secret").write_text("x")
    for digest in ("sha256:../secret", "../secret", "sha256:" + "a" * 63, 5, None):
        layers = [{"mediaType": "application/vnd.ollama.image.model", "digest": digest}]
        manifest.write_text(json.dumps({"layers": layers}))
        refused(lambda: resolve("ollama:bad"), code=6)
    assert list(places.listed()) == []


def test_lm_studio_and_packages(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = home / ".lmstudio" / "models" / "someone" / "A-GGUF" / "a-Q4_0.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    assert dict(places.listed()) == {str(path): path}
    monkeypatch.setattr("minikv.models.places.PACKAGES", {"tiny": ("llm_tiny", "owner/tiny")})
    assert places.packaged("tiny") == "owner/tiny"
    package = home / "packages" / "llm_tiny"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemError('imported')")
    (package / "tiny.gguf").write_bytes(b"GGUF")
    invalidate_caches()
    assert resolve("tiny").folder == package / "tiny.gguf"
    assert places.packaged("other") is None
