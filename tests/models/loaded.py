"""What tests of models load, and what is refused."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import vocabularies as v

from minikv.models.checkpoint import Checkpoint
from minikv.models.config import ModelConfig
from minikv.models.errors import ModelError
from minikv.models.llama import Llama
from minikv.models.tokenizer import Tokenizer
from minikv.models.weights import load_network


def refused(act: Callable[[], object]) -> ModelError:
    """The error of a call that is refused: one printable line."""
    with pytest.raises(ModelError) as caught:
        act()
    text = str(caught.value)
    assert "\n" not in text
    assert text.isprintable()
    return caught.value


def network_of(folder: Path, dtype: torch.dtype | None = None) -> Llama:
    return load_network(Checkpoint.open(folder), ModelConfig.from_folder(folder), dtype=dtype)


@cache
def tokenizer(make: str | Callable[..., dict[str, Any]], *given: Any, **config: str) -> Tokenizer:
    """A tokenizer, read once in a process, which takes up to a second: of a sentencepiece file by
    its version, or of what `make` returns for `given`. config: of tokenizer_config.json. All tests
    have the same one, so none may change it."""
    data = make if isinstance(make, str) else make(*given)
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.from_folder(v.write_folder(Path(folder), data, config or None))
