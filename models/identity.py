"""Identifies a model's files by hashes of the weights and of the tokenizer."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from pathlib import Path

from minikv.models.files import SETTINGS, TOKENIZER

_LARGE = 16 << 20  # bytes of a file above which only samples of it are hashed


def digests(folder: Path) -> dict[str, str]:
    """Hashes of the files of a model's directory, or of its GGUF file: those with its weights, and
    those of its tokenizer. Raises OSError."""
    if folder.is_file():  # a GGUF file, which contains both
        return dict.fromkeys(("weights", "tokenizer"), _digest([folder]))
    stored = sorted([*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")])
    versions = sorted(folder.glob("tokenizer.model.v*"))
    return {
        "weights": _digest([*(folder / name for name in SETTINGS), *stored]),
        "tokenizer": _digest([*(folder / name for name in TOKENIZER), *versions]),
    }


def _digest(paths: Collection[Path]) -> str:
    """A hash of names, sizes and contents; of a large file, its beginning and 64 evenly spaced
    samples."""
    digest = hashlib.sha256()
    for path in filter(Path.is_file, paths):
        with open(path, "rb") as file:
            length = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name} {length}\n".encode())
            if length <= _LARGE:
                digest.update(file.read())
                continue
            digest.update(file.read(1 << 20))
            for i in range(64):
                file.seek((length - 4096) * i // 63)
                digest.update(file.read(4096))
    return digest.hexdigest()[:32]
