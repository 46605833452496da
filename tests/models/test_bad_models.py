"""Every bad model that another test made by hand, as a whole folder: the exact exit code, and what
`loaded.refused` asks of every refusal. The tests of the readers say what each line tells. A part of
them by day, all at night.
"""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import test_config
import test_templates
import test_tokenizer
import test_weights
import tiny
import vocabularies as v
from checkpoints import edit_tensors
from loaded import refused

from minikv import models
from minikv.models.errors import ModelError

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
    return lambda folder: v.write_folder(folder, test_tokenizer.in_bytes(**changes))


def _all() -> Iterator[tuple[str, int, Make]]:
    for name, *given, _ in test_weights.HEADERS:
        yield f"header: {name}", 6, _header(*given)
    for text, code in test_weights.INDEXES:
        yield f"index: {text:.40}", code, _sharded(text)
    for name, raw, code, _ in test_config.BAD:
        yield f"config: {name}", code, _config(raw)
    for i, (change, code, word) in enumerate(test_weights.ACCOUNTS):
        yield f"tensors {i}: {word}", code, _weights(change)
    for files, word in test_weights.FORMATS:
        yield f"format: {word} {files}", 3, _other(files)
    for i, (name, content) in enumerate(test_tokenizer.DAMAGED):
        yield f"tokenizer {i}: {name}", 6, _tokenizer(name, content)
    for said, contents in test_tokenizer.BAD_TEKKENS.items():
        yield f"tekken.json: {said}", 6, _tokenizer("tekken.json", contents[0])
    for name, (changes, _) in test_tokenizer.TOO_MUCH.items():
        yield f"tokenizer: {name}", 6, _too_much(changes)
    for name, source in test_templates.HOSTILE.items():
        yield f"template: {name}", 6, _text("chat_template.jinja", source)


CASES = [*_all()]


def test_there_are_many_and_each_has_its_name() -> None:
    names = [name for name, _, _ in CASES]
    assert len(set(names)) == len(names) >= 250


def test_every_bad_model_is_refused_as_its_part_is(tmp_path: Path, part: float) -> None:
    good = tiny.write(tmp_path / "good")
    # A template that is stopped takes its second, and has had it in its own test.
    quick = [case for case in CASES if part == 1.0 or not case[0].startswith("template")]
    wrong = []
    for name, code, make in random.Random(8).sample(quick, int(part * len(quick))):
        folder = tmp_path / "bad"
        shutil.copytree(good, folder)
        make(folder)
        found = refused(lambda folder=folder: models.load(folder), seconds=4.0).exit_code
        if found != code:
            wrong.append((name, found))
        shutil.rmtree(folder)
    assert wrong == []
