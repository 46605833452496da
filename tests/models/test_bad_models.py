"""Every bad model that another test made by hand, as a whole folder: the exact exit code, and what
`loaded.refused` asks of every refusal. The tests of the readers say what each line tells. A part of
them by day, all at night.
"""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Iterator
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
from minikv.models.files import INDEX


def _all() -> Iterator[tuple[str, int, str, Any]]:
    """A name, the exit code, the kind, and what `_spoil` needs."""
    for name, *given, _ in test_weights.HEADERS:
        yield f"header: {name}", 6, "header", given
    for text, code in test_weights.INDEXES:
        yield f"index: {text:.40}", code, "index", text
    for name, raw, code, _ in test_config.BAD:
        yield f"config: {name}", code, "config", raw
    for i, (change, code, word) in enumerate(test_weights.ACCOUNTS):
        yield f"tensors {i}: {word}", code, "tensors", change
    for files, word in test_weights.FORMATS:
        yield f"format: {word} {files}", 3, "format", files
    for i, (name, content) in enumerate(test_tokenizer.DAMAGED):
        yield f"tokenizer {i}: {name}", 6, "tokenizer", (name, content)
    for said, contents in test_tokenizer.BAD_TEKKENS.items():
        yield f"tekken.json: {said}", 6, "tokenizer", ("tekken.json", contents[0])
    for name, (changes, _) in test_tokenizer.TOO_MUCH.items():
        yield f"tokenizer: {name}", 6, "too much", changes
    for name, source in test_templates.HOSTILE.items():
        yield f"template: {name}", 6, "template", source


def _spoil(folder: Path, kind: str, bad: Any) -> None:
    """Put it into the folder of a good model."""
    weights = folder / "model.safetensors"
    if kind == "header":
        test_weights.raw_file(weights, *bad)
    elif kind == "index":
        weights.rename(folder / "model-00001-of-00001.safetensors")
        (folder / INDEX).write_text(bad)
    elif kind == "config":
        with contextlib.suppress(ModelError):
            test_config.read(folder, bad)
    elif kind == "tensors":
        edit_tensors(weights, bad)
    elif kind == "format":
        weights.unlink()
        for name in bad:
            (folder / name).write_bytes(b"\x80\x04.")
    elif kind == "tokenizer":
        name, content = bad
        if name in ("tokenizer.model", "tekken.json"):
            (folder / "tokenizer.json").unlink()
        (folder / name).write_bytes(content)
    elif kind == "too much":
        v.write_folder(folder, test_tokenizer.in_bytes(**bad))
    else:
        (folder / "chat_template.jinja").write_text(bad)


CASES = [*_all()]


def test_there_are_many_and_each_has_its_name() -> None:
    names = [name for name, *_ in CASES]
    assert len(set(names)) == len(names) >= 250


def test_every_bad_model_is_refused_as_its_part_is(tmp_path: Path, part: float) -> None:
    good = tiny.write(tmp_path / "good")
    # A template that is stopped takes its second, and has had it in its own test.
    quick = [case for case in CASES if part == 1.0 or not case[0].startswith("template")]
    wrong = []
    for name, code, *bad in random.Random(8).sample(quick, int(part * len(quick))):
        folder = tmp_path / "bad"
        shutil.copytree(good, folder)
        _spoil(folder, *bad)
        found = refused(lambda folder=folder: models.load(folder), seconds=4.0).exit_code
        if found != code:
            wrong.append((name, found))
        shutil.rmtree(folder)
    assert wrong == []
