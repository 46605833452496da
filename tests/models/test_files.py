"""The files of a model's folder: what is read of them, what they are known by, and what a download
left in their place."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Spec, write
from loaded import refused
from pairwise import some_by_day

import minikv.models as models
from minikv.models import files
from minikv.models.checkpoint import read_header
from minikv.models.files import INDEX, read_json, wanted_files
from minikv.models.identity import digests

MODEL, TEKKEN, WORDS = "model.safetensors", "tekken.json", "tokenizer.json"
ORIGINAL, PIECES, PART = "consolidated.safetensors", "tokenizer.model.v3", "part-a.safetensors"


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["config.json", MODEL, ORIGINAL], ["config.json", MODEL]),
        (["params.json", ORIGINAL, "x.bin"], [ORIGINAL, "params.json"]),
        (["config.json", INDEX, PART, "consolidated.00.safetensors"], ["config.json", INDEX, PART]),
        (["config.json", MODEL, PIECES], ["config.json", MODEL, PIECES]),
        (["config.json", MODEL, PIECES, WORDS], ["config.json", MODEL, WORDS]),
        (["config.json", MODEL, TEKKEN], ["config.json", MODEL, TEKKEN]),
        (["config.json", MODEL, TEKKEN, WORDS], ["config.json", MODEL, WORDS]),
    ],
)
def test_which_weights_are_wanted(names: list[str], wanted: list[str]) -> None:
    assert wanted_files(names) == wanted


def test_json_is_read_from_regular_files_only(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    refused(lambda: files.read_json(tmp_path / "config.json"), code=6)
    refused(lambda: files.read_json(Path("/dev/zero")), code=6)
    refused(lambda: files.read_json(tmp_path / "absent.json"), code=3)
    (tmp_path / "long.json").write_text(json.dumps({"a": "x" * 100}))
    assert files.read_json(tmp_path / "long.json") == {"a": "x" * 100}
    (tmp_path / "long.json").write_text(json.dumps({"a": "x" * (1 << 20)}))
    refused(lambda: files.read_json(tmp_path / "long.json"), code=6)


DAILY = [
    (WORDS, b'{"a": [', b"{},", b"0]}"),
    (INDEX, b'{"a": [', b"[],", b"0]}"),
    ("tokenizer_config.json", b'{"a": [', b"[],", b"0]}"),
]
NIGHTLY = [
    (WORDS, b'{"a": [', b"0,", b"0]}"),
    (WORDS, b'{"a": {', b'"":0,' + b" " * 50, b'"":0}}'),  # only pairs are many
    (WORDS, b'{"a": "', b":", b'"}'),
]


@pytest.mark.parametrize(
    ("name", "start", "many", "end"), some_by_day([*DAILY, *NIGHTLY], DAILY.__contains__)
)
def test_json_that_would_fill_the_memory_is_not_parsed(
    tmp_path: Path, name: str, start: bytes, many: bytes, end: bytes, monkeypatch: Any
) -> None:
    """A file just small enough to be read, of nothing but lists, or of pairs: forty bytes of memory
    and more for each of its own."""
    monkeypatch.setattr(json, "loads", lambda *args, **kwargs: pytest.fail("it was parsed"))
    room = files.JSON_LIMITS[name] - len(start) - len(end)
    (tmp_path / name).write_bytes(start + many * (room // len(many)) + end)
    refused(lambda: files.read_json(tmp_path / name), "lists and objects", code=6)


def test_json_as_of_the_largest_vocabularies_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """262,144 pieces, 515,000 merges in lists, and 6,400 added tokens of seven pairs; and twice as
    many."""
    monkeypatch.setattr(json, "loads", lambda *args, **kwargs: {})
    for times in (1.0, 1.9):
        pieces = b'"a": 1, ' * round(times * 262_144)
        merges = b'["a", "b"], ' * round(times * 515_000)
        added = b"{" + b'"a": 1, ' * 7 + b"}, "
        assert files.parse_json(pieces + merges + added * round(times * 6_400), "x") == {}


STAND_INS = [
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d4d\nsize 2\n", "a Git LFS pointer"),
    (b"version https://hawser.github.com/spec/v1\noid sha256:4d4d\nsize 2\n", "a Git LFS pointer"),
    (b"<!DOCTYPE html>\n<html><head><title>Log in</title></head></html>", "a web page"),
    (b"\xef\xbb\xbf\r\n <!-- saved -->\n<HTML lang=en><body></body></HTML>", "a web page"),
    (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "a web page"),
    (b"<Error><Code>AccessDenied</Code></Error>", "a web page"),
    (b"<head><title>404</title></head>", "a web page"),
]


@pytest.mark.parametrize(("data", "words"), STAND_INS)
@pytest.mark.parametrize("name", ["model.safetensors", INDEX, "config.json", "tokenizer.json"])
def test_what_a_download_left_in_place_of_a_file(
    name: str, data: bytes, words: str, tmp_path: Path
) -> None:
    write(Spec(), tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / name).write_bytes(data)
    error = refused(lambda: models.load(tmp_path), f"{name} is {words}", code=6)
    assert "hf download" in error.hint


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"Entry not found", "'Entry not found'"),
        (b"404\n", "'404'"),
        (b'{"error": "Repository not found"}', "Repository not found"),
        (b"\xef\xbb\xbf" + "é".encode() * 600, r"\xe9"),  # a character is cut in two
        (b"Access to it is restricted.\r\n" * 99, "restricted. Access to it is restricted. Acce'"),
        (b"Latin-1: \xe9 and more", ""),
        (b"\x1f\x8bpacked", ""),
        (b"Not a text\0", ""),
        (b"\0\1", ""),
        (b"", ""),
    ],
)
def test_a_text_in_place_of_weights_is_quoted(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    error = refused(lambda: read_header(path))
    assert ("contains text instead of weights: " in str(error)) == bool(said)
    assert said in str(error)
    assert len(str(error)) < 150
    assert "download the file again" in error.hint


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", INDEX])
@pytest.mark.parametrize("data", [b"Entry not found", b'"Not found"'])
def test_json_that_is_none_is_to_be_fetched_again(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    assert "hf download" in refused(lambda: read_json(tmp_path / name)).hint


def test_files_are_told_apart_a_large_one_by_samples(tmp_path: Path) -> None:
    """The rows of a tier and the cache of a saved chat are of these weights and this tokenizer."""
    weights, seen = bytearray(20 << 20), []
    for at in (0, 10 << 20):
        weights[at : at + (1 << 19)] = b"\1" * (1 << 19)
        (tmp_path / "model.safetensors").write_bytes(weights)
        seen.append(digests(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    seen.append(digests(tmp_path))
    first, second, third = seen
    assert first["weights"] != second["weights"] == third["weights"]
    assert first["tokenizer"] == second["tokenizer"] != third["tokenizer"]
