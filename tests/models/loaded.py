"""What tests of models load, and what is refused."""

from __future__ import annotations

import contextlib
import tempfile
import time
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
from minikv.models.templates import Message
from minikv.models.tokenizer import Tokenizer
from minikv.models.weights import load_network


def resident(key: str, process: int | str = "self") -> int:
    """Bytes of a process in memory: VmRSS now, VmHWM at most since the peak was reset."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition(f"{key}:")[2].split()[0]) << 10


def refused(
    act: Callable[[], object],
    *words: str,
    code: int | None = None,
    seconds: float = 2.0,
    memory: int = 512 << 20,
) -> ModelError:
    """The error of a call that is refused: one printable line, which has these words, with this
    exit code, within so many seconds of this process and so much more memory than it had."""
    with contextlib.suppress(OSError):  # else the peak is that of the whole run
        Path("/proc/self/clear_refs").write_text("5")
    before, began = resident("VmRSS"), time.process_time()
    with pytest.raises(ModelError) as caught:
        act()
    assert time.process_time() - began < seconds
    assert resident("VmHWM") - before < memory
    text = str(caught.value)
    assert "\n" not in text
    assert text.isprintable()
    assert [word for word in words if word not in text] == [], text
    assert code in (None, caught.value.exit_code), text
    return caught.value


def network_of(folder: Path, dtype: torch.dtype | None = None) -> Llama:
    return load_network(Checkpoint.open(folder), ModelConfig.from_folder(folder), dtype=dtype)


def turns(*texts: str | Message, system: str | None = None) -> list[Message]:
    """Questions and answers, perhaps after a system prompt."""
    said = [] if system is None else [Message("system", system)]
    for n, text in enumerate(texts):
        role = "assistant" if n % 2 else "user"
        said.append(Message(role, text) if isinstance(text, str) else text)
    return said


@cache
def tokenizer(make: str | Callable[..., dict[str, Any]], *given: Any, **config: str) -> Tokenizer:
    """A tokenizer, read once in a process, which takes up to a second: of a sentencepiece file by
    its version, or of what `make` returns for `given`. config: of tokenizer_config.json. All tests
    have the same one, so none may change it."""
    data = make if isinstance(make, str) else make(*given)
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.from_folder(v.write_folder(Path(folder), data, config or None))
