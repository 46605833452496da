"""Every bad model that another test made by hand, as a whole folder: the exact exit code, one line,
at most 2 seconds of this process and 512 MiB more than it had.

The tests of the readers say what each line tells. A fifth of them here by day, all at night; six
go through the whole program.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_config
import test_templates
import test_tokenizer
import test_weights
import tiny
import vocabularies as v
from checkpoints import edit_tensors
from forked import run

from minikv import models
from minikv.models.errors import ModelError

SECONDS, BYTES = 2.0, 512 << 20
SHARD = "model-00001-of-00001.safetensors"

Make = Callable[[Path], object]


def _text(name: str, content: str | bytes) -> Make:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def _config(raw: object) -> Make:
    def make(folder: Path) -> None:
        with contextlib.suppress(ModelError):
            test_config.read(folder, raw)

    return make


def _header(header: object, data: bytes, length: int | None) -> Make:
    return lambda folder: test_weights.raw_file(folder / "model.safetensors", header, data, length)


def _sharded(text: str) -> Make:
    def make(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / SHARD)
        (folder / "model.safetensors.index.json").write_text(text)

    return make


def _weights(change: Any) -> Make:
    return lambda folder: edit_tensors(folder / "model.safetensors", change)


def _other(files: list[str]) -> Make:
    def make(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        for name in files:
            (folder / name).write_bytes(b"\x80\x04.")

    return make


def _tokenizer(name: str, content: bytes) -> Make:
    def make(folder: Path) -> None:
        if name in ("tokenizer.model", "tekken.json"):
            (folder / "tokenizer.json").unlink()
        (folder / name).write_bytes(content)

    return make


def _too_much(changes: dict[str, Any]) -> Make:
    return lambda folder: v.write_folder(folder, {**v.byte_level_json(v.LLAMA_3, 1000), **changes})


CASES: list[tuple[str, int, Make]] = [
    *((f"header: {name}", 6, _header(*given)) for name, *given, _ in test_weights.HEADERS),
    *((f"index: {text:.40}", code, _sharded(text)) for text, code in test_weights.INDEXES),
    *((f"config: {name}", code, _config(raw)) for name, raw, code, _ in test_config.BAD),
    *(
        (f"tensors {i}: {word}", code, _weights(change))
        for i, (change, code, word) in enumerate(test_weights.ACCOUNTS)
    ),
    *(
        (f"format: {word} {files}", code, _other(files))
        for files, code, word in test_weights.FORMATS
    ),
    *(
        (f"tokenizer {i}: {name}", 6, _tokenizer(name, content))
        for i, (name, content) in enumerate(test_tokenizer.DAMAGED)
    ),
    *(
        (f"tekken.json: {said}", 6, _tokenizer("tekken.json", contents[0]))
        for said, contents in test_tokenizer.BAD_TEKKENS.items()
    ),
    *(
        (f"tokenizer: {name}", 6, _too_much(changes))
        for name, (changes, _) in test_tokenizer.TOO_MUCH.items()
    ),
    *(
        (f"template: {name}", 6, _text("chat_template.jinja", source))
        for name, source in test_templates.HOSTILE.items()
    ),
]


def test_there_are_many_and_each_has_its_name() -> None:
    names = [name for name, _, _ in CASES]
    assert len(set(names)) == len(names) >= 250


def resident(peak: bool = False) -> int:
    """Bytes of this process that are in memory, or the most since `forget`."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM" if peak else "VmRSS")
    )
    return int(line.split()[1]) * 1024


def refusal(folder: Path) -> tuple[int, str, float, int]:
    """Exit code, message, seconds of this process and bytes that loading took."""
    with contextlib.suppress(OSError):  # else the peak is that of the whole run
        Path("/proc/self/clear_refs").write_text("5")
    before, began = resident(), time.process_time()
    with pytest.raises(ModelError) as caught:
        models.load(folder)
    error = caught.value
    took = time.process_time() - began
    return error.exit_code, str(error), took, resident(peak=True) - before


def test_every_bad_model_is_refused_in_one_line_soon_and_in_little_memory(
    tmp_path: Path, part: float
) -> None:
    good = tiny.write(tmp_path / "good")
    # A template that is stopped takes its second, and has had it in its own test.
    quick = [case for case in CASES if part == 1.0 or not case[0].startswith("template")]
    chosen = random.Random(8).sample(quick, int(part * len(quick)))
    wrong = []
    for name, code, make in chosen:
        folder = tmp_path / "bad"
        shutil.copytree(good, folder)
        make(folder)
        found, text, seconds, size = refusal(folder)
        if found != code or "\n" in text or not text.isprintable():
            wrong.append((name, found, text))
        if seconds > SECONDS or size > BYTES:
            wrong.append((name, seconds, size))
        shutil.rmtree(folder)
    assert wrong == []


@pytest.mark.parametrize("at", range(6))
def test_the_program_says_it_and_leaves_with_that_code(tmp_path: Path, at: int) -> None:
    name, code, make = random.Random(at).choice(CASES)
    folder = tiny.write(tmp_path / "bad")
    make(folder)
    done = run("ask", "q", "-m", str(folder), "-", stdin="text")
    assert (done.code, done.out) == (code, ""), name
    assert done.err.startswith("error: ")
    assert len(done.err.splitlines()) <= 2
    assert "Traceback" not in done.err
