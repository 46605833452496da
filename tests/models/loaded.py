"""The tokenizers of `vocabularies`, each read once in a process: that takes up to a second."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import vocabularies as v

from minikv.models.tokenizer import Tokenizer


@cache
def tokenizer(make: str | Callable[..., dict[str, Any]], *given: Any, **config: str) -> Tokenizer:
    """Of a sentencepiece file by its version, or of what `make` returns for `given`. config: of
    tokenizer_config.json. All tests have the same one, so none may change it."""
    data = make if isinstance(make, str) else make(*given)
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.from_folder(v.write_folder(Path(folder), data, config or None))
