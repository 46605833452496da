"""Text that arrives token by token is the text of all tokens together."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import loaded
import pytest
import tokenizers
import vocabularies as v
from pairwise import some_by_day

from minikv.models.errors import UnsupportedModel
from minikv.models.stream import (
    TextStream,
    byte_level_alphabet,
    byte_level_bytes,
    word_piece_bytes,
)
from minikv.models.tokenizer import Tokenizer

COUNT, MANY = 7_000, 34_000  # by day a part, and all at night: for each of three vocabularies


KINDS: dict[str, tuple[Any, ...]] = {
    "pieces": ("v3",),
    "words": (v.legacy_json, "v1"),
    "bytes": (v.byte_level_json,),
    "all of tekken": (v.tekken_json,),
}
BY_DAY = some_by_day(KINDS, lambda kind: kind != "all of tekken")
"""By day the first 20,000 ranks of tekken's are enough: they spell any text."""


def streamed(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push(id) for id in ids), stream.flush()]


def drawn(part: float) -> int:
    """How many texts, or lists of ids."""
    return MANY if part == 1.0 else int(part * COUNT)


@pytest.mark.parametrize("kind", BY_DAY)
def test_random_texts(kind: str, part: float) -> None:
    text_of = loaded.tokenizer(*KINDS[kind])
    rng = random.Random(11)
    for _ in range(drawn(part)):
        text = v.random_text(rng, tuple(text_of.control)[:9]).replace("▁", "_")
        ids = text_of.encode(text)
        assert "".join(streamed(text_of, ids)) == text_of.decode(ids) == text


@pytest.mark.parametrize("kind", BY_DAY)
def test_random_ids(kind: str, part: float) -> None:
    text_of = loaded.tokenizer(*KINDS[kind])
    rng = random.Random(12)
    low, high = -5, text_of.vocab + 500
    for _ in range(drawn(part)):
        ids = [
            rng.choice([rng.randrange(low, high), rng.randrange(0, 1300)])
            for _ in range(rng.randrange(12))
        ]
        deltas = streamed(text_of, ids)
        assert len(deltas) == len(ids) + 1
        assert "".join(deltas) == text_of.decode(ids)


@pytest.mark.parametrize("version", ["v1", "v3"])
def test_text_is_that_of_sentencepiece(version: str, part: float) -> None:
    """Random ids, control and byte pieces among them, wherever they spell valid UTF-8.

    Only a space as a byte piece differs: sentencepiece keeps it even at the start of the text.
    """
    model = v.vendor(version)
    text_of = loaded.tokenizer(version)
    marks = {text_of.control[c] for c in text_of.control if "REFERENCE_DOC" in c}
    rng = random.Random(13)
    compared = 0
    for _ in range(drawn(part)):
        ids = [rng.randrange(1, text_of.vocab) for _ in range(rng.randrange(12))]
        ids += rng.choices(range(1, 1300), k=3)
        ids = [id for id in ids if id not in marks and id != model.piece_to_id("<0x20>")]
        expected = model.decode(ids)
        if "\ufffd" not in expected:
            assert text_of.decode(ids) == expected
            compared += 1
    assert compared > drawn(part) / 2


def test_byte_level_text_is_that_of_tokenizers(part: float) -> None:
    text_of = loaded.tokenizer(v.byte_level_json)
    backend = tokenizers.Tokenizer.from_str(json.dumps(v.byte_level_json()))
    rng = random.Random(14)
    compared = 0
    for _ in range(drawn(part)):
        ids = [rng.randrange(64, text_of.vocab) for _ in range(rng.randrange(8))]
        expected = backend.decode(ids)
        if "\ufffd" not in expected:
            assert text_of.decode(ids) == expected
            compared += 1
    assert compared > drawn(part) / 2


def test_alphabet() -> None:
    assert set(byte_level_alphabet()) == v.alphabet_of_tokenizers()
    assert sorted(byte_level_alphabet().values()) == list(range(256))


def test_a_character_is_held_back_until_it_is_complete() -> None:
    pieces = [bytes([byte]) for byte in "é🤗".encode()] + [b"a"]
    stream = TextStream(pieces)
    assert [stream.push(n) for n in range(7)] == ["", "é", "", "", "", "🤗", "a"]
    assert stream.flush() == ""


@pytest.mark.parametrize("id", [-1, 2, 1 << 40])
def test_an_id_without_a_piece_has_no_text(id: int) -> None:
    stream = TextStream([b"a", b""])
    assert [stream.push(n) for n in (0, id, 1, 0)] == ["a", "", "", "a"]


def test_an_unfinished_character_is_one_replacement() -> None:
    stream = TextStream([b"\xf0\x9f", b"x", b"\xf0\x9f\xa4"])
    assert [stream.push(0), stream.push(1), stream.push(2)] == ["", "\ufffdx", ""]
    assert stream.flush() == "\ufffd"


def test_a_genuine_replacement_character_at_the_end_is_kept() -> None:
    stream = TextStream(["\ufffd".encode()])
    assert stream.push(0) + stream.flush() == "\ufffd"


@pytest.mark.parametrize(
    ("drop", "parts", "text"),
    [
        (True, [b" a", b" b"], "a b"),
        (True, [b"  a"], " a"),
        (True, [b" ", b" a"], " a"),
        (True, [b"", b"\xc3", b"\xa9"], "é"),
        (True, [b"a", b" b"], "a b"),
        (False, [b" a", b" b"], " a b"),
    ],
)
def test_one_leading_space_is_dropped_once(drop: bool, parts: list[bytes], text: str) -> None:
    stream = TextStream(parts, drop)
    assert "".join(stream.push(n) for n in range(len(parts))) + stream.flush() == text


def test_byte_pieces() -> None:
    assert word_piece_bytes("<0x0A>") == b"\n"
    assert word_piece_bytes("<0x0A>", byte_fallback=False) == b"<0x0A>"
    assert word_piece_bytes("▁a▁") == b" a "


def test_byte_level_pieces() -> None:
    """One character a byte; a word that was added in plain text is what it says."""
    assert byte_level_bytes("Ġa") == b" a"
    assert byte_level_bytes("Ã©") == "é".encode()
    assert byte_level_bytes("a b") == b"a b"
    assert byte_level_bytes("\ud800") == b"?"


def test_an_unsupported_decoder_is_refused(tmp_path: Path) -> None:
    data: dict[str, Any] = v.byte_level_json(entries=300, count=8)
    data["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        Tokenizer.from_folder(v.write_folder(tmp_path, data))
