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

from minikv.models.stream import TextStream, byte_level_alphabet, byte_level_bytes, word_piece_bytes
from minikv.models.tokenizer import Tokenizer

COUNT, MANY = 7_000, 34_000  # by day a part, and all at night: for each of three vocabularies
KINDS: dict[str, tuple[Any, ...]] = {
    "pieces": ("v3",),
    "words": (v.legacy_json, "v1"),
    "bytes": (v.byte_level_json,),
    "all of tekken": (v.byte_level_json, v.NEMO, 1 << 20, v.TEKKEN_SPECIALS),
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
def test_random_texts_and_ids(kind: str, part: float) -> None:
    text_of = loaded.tokenizer(*KINDS[kind])
    rng = random.Random(11)
    for _ in range(drawn(part)):
        text = v.random_text(rng, tuple(text_of.control)[:9]).replace("▁", "_")
        ids = text_of.encode(text)
        assert "".join(streamed(text_of, ids)) == text_of.decode(ids) == text
        ids = [
            rng.choice([rng.randrange(-5, text_of.vocab + 500), rng.randrange(0, 1300)])
            for _ in range(rng.randrange(12))
        ]
        deltas = streamed(text_of, ids)
        assert len(deltas) == len(ids) + 1
        assert "".join(deltas) == text_of.decode(ids)


@pytest.mark.parametrize("of", ["v1", "v3", v.byte_level_json])
def test_text_is_that_of_sentencepiece_or_tokenizers(of: Any, part: float) -> None:
    """Random ids wherever they spell valid UTF-8: of sentencepiece with control and byte pieces.

    Only a space as a byte piece differs: sentencepiece keeps it even at the start of the text.
    """
    text_of, rng, compared = loaded.tokenizer(of), random.Random(13), 0
    pieces = of in ("v1", "v3")
    vendor: Any = v.vendor(of) if pieces else tokenizers.Tokenizer.from_str(json.dumps(of()))
    without = {id for text, id in text_of.control.items() if "REFERENCE_DOC" in text or not pieces}
    without |= {vendor.piece_to_id("<0x20>")} if pieces else set()
    for _ in range(drawn(part)):
        ids = [rng.randrange(1, text_of.vocab) for _ in range(rng.randrange(12))]
        ids += rng.choices(range(1, 1300), k=3)
        ids = [id for id in ids if id not in without]
        expected = vendor.decode(ids)
        if "\ufffd" not in expected:
            assert text_of.decode(ids) == expected
            compared += 1
    assert compared > drawn(part) / 2


def test_alphabet() -> None:
    assert {*byte_level_alphabet()} == {*tokenizers.pre_tokenizers.ByteLevel.alphabet()}
    assert sorted(byte_level_alphabet().values()) == list(range(256))


@pytest.mark.parametrize(
    ("pieces", "drop", "ids", "deltas"),
    [
        # A character is held back until it is complete; an unfinished one is one replacement.
        ([bytes([b]) for b in "é🤗".encode()], False, range(6), ["", "é", "", "", "", "🤗", ""]),
        ([b"\xf0\x9f", b"x", b"\xf0\x9f\xa4"], False, range(3), ["", "\ufffdx", "", "\ufffd"]),
        (["\ufffd".encode()], False, [0], ["\ufffd", ""]),
        # An id without a piece has no text.
        *(([b"a", b""], False, [0, id, 1, 0], ["a", "", "", "a", ""]) for id in (-1, 2, 1 << 40)),
        # One leading space is dropped, once.
        ([b" a", b" b"], True, [0, 1], ["a", " b", ""]),
        ([b"  a"], True, [0], [" a", ""]),
        ([b" ", b" a"], True, [0, 1], ["", " a", ""]),
        ([b"", b"\xc3", b"\xa9"], True, range(3), ["", "", "é", ""]),
        ([b"a", b" b"], True, [0, 1], ["a", " b", ""]),
        ([b" a", b" b"], False, [0, 1], [" a", " b", ""]),
    ],
)
def test_what_comes_with_each_token(pieces: Any, drop: bool, ids: Any, deltas: list[str]) -> None:
    stream = TextStream(pieces, drop)
    assert [*map(stream.push, ids), stream.flush()] == deltas


def test_the_bytes_of_pieces() -> None:
    """Of byte-level ones one for each character; a word that was added in plain text is what it
    says."""
    assert word_piece_bytes("<0x0A>") == b"\n"
    assert word_piece_bytes("<0x0A>", byte_fallback=False) == b"<0x0A>"
    assert word_piece_bytes("▁a▁") == b" a "
    assert byte_level_bytes("Ġa") == b" a"
    assert byte_level_bytes("Ã©") == "é".encode()
    assert byte_level_bytes("a b") == b"a b"
    assert byte_level_bytes("\ud800") == b"?"


def test_an_unsupported_decoder_is_refused(tmp_path: Path) -> None:
    data: dict[str, Any] = v.byte_level_json(entries=300, count=8)
    data["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    folder = v.write_folder(tmp_path, data)
    loaded.refused(lambda: Tokenizer.from_folder(folder), "WordPiece", code=3)
