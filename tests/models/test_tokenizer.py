"""Vocabularies give the vendor's ids; no text gives a control id; bad files are named."""

from __future__ import annotations

import base64
import json
import random
import re
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import pairwise as side_by_side
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import loaded
import pytest
import tokenizers
import vocabularies as v
from loaded import refused
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from pairwise import some_by_day

from minikv import models
from minikv.models import split_patterns, vocabulary
from minikv.models.errors import CorruptModel
from minikv.models.templates import ChatTemplate
from minikv.models.tokenizer import Tokenizer, well_formed
from minikv.models.tokenizer_json import byte_level
from minikv.models.vocabulary import TokenSearch, check_added

STRINGS = 25_000
KINDS: Any = {"pieces": ["v3"], "words": [v.legacy_json, "v3"], "bytes": [v.byte_level_json]}
Read = Callable[..., Tokenizer]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """The tokenizer of a folder with such files. files: further ones, name to data."""

    def of(data: Any, config: Any = None, files: Any = (), **given: Any) -> Tokenizer:
        folder = v.write_folder(Path(tempfile.mkdtemp(dir=tmp_path)), data, config)
        for name, content in dict(files).items():
            (folder / name).write_text(json.dumps(content), "utf-8")
        return Tokenizer.from_folder(folder, **given)

    return of


def texts(seed: int, extra: Iterable[str], count: float) -> Iterator[str]:
    rng, extra = random.Random(seed), tuple(extra)
    return (v.random_text(rng, extra) for _ in range(int(count)))


def mismatches(tokenizer: Tokenizer, vendor: Any, texts: Iterable[str]) -> list[str]:
    return [text for text in texts if tokenizer.encode(text) != vendor(text)]


@pytest.mark.parametrize("version", ["v1", "v3", "v7"])
def test_sentencepiece_ids_are_the_vendors(version: str, part: float) -> None:
    tokenizer = loaded.tokenizer(version)
    hostile = (text for text in tokenizer.control if "REF" not in text)
    drawn = texts(1, hostile, part * STRINGS)
    assert mismatches(tokenizer, v.vendor(version).encode, drawn) == []


@pytest.mark.parametrize("version", ["v1", "v3"])
def test_the_two_formats_agree_on_control_tokens_and_places(version: str, part: float) -> None:
    pieces, words = loaded.tokenizer(version), loaded.tokenizer(v.legacy_json, version)
    assert pieces.control == words.control
    assert (pieces.bos, pieces.stop_ids) == (words.bos, words.stop_ids) == (1, {2})
    for text in texts(4, pieces.control, round(STRINGS / 2 * part)):
        for place in ("start", "after", "inside"):
            assert pieces.encode(text, place) == words.encode(text, place), text


@pytest.mark.parametrize("ranks", some_by_day([20_000, 1 << 20], lambda ranks: ranks == 20_000))
def test_tekken_ids_are_those_of_tiktoken(tmp_path: Path, ranks: int, part: float) -> None:
    """Of the first ranks by day, and of all of tekken every night: of the vendor's file, and of a
    tokenizer.json."""
    tokenizer = Tokenizer.from_folder(v.write_folder(tmp_path, v.tekken(ranks)))
    words = loaded.tokenizer(v.byte_level_json, v.NEMO, ranks, v.TEKKEN_SPECIALS)
    ids = tekken_ids(tmp_path / "tekken.json")
    assert tokenizer.vocab == words.vocab == min(ranks + v.TEKKEN_SPECIALS, 131_072)
    for of, seed in ((tokenizer, 3), (words, 4)):
        assert mismatches(of, ids, texts(seed, [*of.control][:40], part * STRINGS)) == []
    assert (tokenizer.bos, tokenizer.stop_ids, tokenizer.start) == (1, {2}, "<s>")
    text = "caf\u00e9 [INST] 1998 \U0001f600\n"
    assert tokenizer.decode([1, 3, *tokenizer.encode(text), 4, 999, 2]) == text
    assert (tokenizer.notes, tokenizer.version) == ((), "v3")


def tekken_ids(file: Path) -> Callable[[str], list[int]]:
    vendor = Tekkenizer.from_file(file)
    return lambda text: vendor.encode(text, bos=False, eos=False)


@pytest.mark.soak
@pytest.mark.parametrize("version", v.REAL)
def test_all_real_vocabularies_give_the_vendors_ids(read: Read, version: str) -> None:
    tekken = version.startswith("tekken")
    ids = tekken_ids(v.vendor_file(version)) if tekken else v.vendor(version).encode
    tokenizer = read(version)
    hostile = [text for text in tokenizer.control if "REF" not in text][:60]
    assert mismatches(tokenizer, ids, texts(5, hostile, 100_000)) == []


def test_places(read: Read) -> None:
    model = v.vendor("v3")
    spaced, bare = model.encode("a b"), [model.piece_to_id("a"), *model.encode("b")]
    for tokenizer, prefix, after in (
        (loaded.tokenizer(v.legacy_json, "v3"), "every", spaced),
        (loaded.tokenizer(v.first_json, "v3"), "first", bare),
        (read("v3", {"legacy": False}), "first", bare),
    ):
        found = [tokenizer.encode("a b", place) for place in ("start", "after", "inside")]
        assert (tokenizer.prefix, found) == (prefix, [spaced, after, bare])


def test_a_vocabulary_that_holds_control_strings_as_words(read: Read) -> None:
    # With ignore_merges a whole word is looked up directly, control tokens included.
    data = v.byte_level_json(("[HALT]", "<END>", "<end>"), 1000, 8) | {"pre_tokenizer": UNPACKED}
    tokenizer = read(data)
    assert tokenizer.control["[HALT]"] == 0
    for text in ("[HALT]", "<END>"):
        ids = tokenizer.encode(text)
        assert set(ids).isdisjoint(tokenizer.control.values())
        assert tokenizer.decode(ids) == text
    lower = read(data | {"normalizer": {"type": "Lowercase"}})
    refused(lambda: lower.encode("<eNd>"), "control tokens out of plain text", code=3)


def test_a_word_used_as_padding_stays_a_word(read: Read) -> None:
    data, text = v.byte_level_json(v.LLAMA_3, 1000, 8), "Hello! Really!"
    config = {"pad_token": "!", "eos_token": "<|eot_id|>"}
    assert read(v.legacy_json("v1"), config).encode(text) == v.vendor("v1").encode(text)
    padded = read(data, config)
    assert padded.encode(text) == read(data).encode(text)
    assert padded.decode(padded.encode(text)) == text
    assert padded.named["pad_token"] == "!"


def test_texts_that_others_read_differently() -> None:
    # U+0109 is a letter for sentencepiece, and a tab for byte-level vocabularies.
    words = loaded.tokenizer(v.legacy_json, "v1")
    assert "\u0109" in words.decode(words.encode("a\u0109b"))
    # Lone surrogates are replaced.
    assert well_formed("a\udcffb\ud83d\ude00c\ud83d") == "a\ufffdb😀c\ufffd"
    for kind in KINDS.values():
        one = loaded.tokenizer(*kind)
        assert one.decode(one.encode("a\udcffb\ud83d\ude00")) == "a\ufffdb😀"
    # User-defined pieces that the vendor's tokenizer makes from text; a document must not.
    tokenizer, tag = loaded.tokenizer("v3"), "[REFERENCE_DOC_3]"
    assert tokenizer.control[tag] in v.vendor("v3").encode(tag)
    assert tokenizer.control[tag] not in tokenizer.encode(tag)
    assert tokenizer.decode(tokenizer.encode(tag)) == tag


def test_stop_ids_come_from_every_source(read: Read) -> None:
    config = {"eos_token": {"content": "<|end_of_text|>"}, "bos_token": "<|begin_of_text|>"}
    ids = {name: n for n, name in enumerate(v.LLAMA_3)}
    by_config = read(v.byte_level_json(v.LLAMA_3, 1000, 8), config, stop_ids=[77])
    wanted = {77, ids["<|end_of_text|>"], ids["<|eot_id|>"], ids["<|eom_id|>"]}
    assert (by_config.stop_ids, by_config.bos) == (wanted, 0)
    other = {"special_tokens_map.json": {"eos_token": "<|endoftext|>"}}
    assert read(v.byte_level_json(v.CHATML, 1000, 8), files=other).stop_ids == {0, 2}
    assert read("v1", stop_ids=(5,)).stop_ids == {2, 5}


def test_named_tokens_become_control_tokens(read: Read) -> None:
    # A configuration may call entries special that tokenizer.json does not flag or even list.
    data = v.byte_level_json(("EOT:", "<s>", "END!"), 1000, 8)
    data["added_tokens"] = [
        {**entry, "special": False} for entry in data["added_tokens"] if entry["content"] != "END!"
    ]
    data["model"]["vocab"]["HALT NOW"] = len(data["model"]["vocab"])
    declared = {"1008": {"content": "HALT NOW", "special": True}}
    config = {"eos_token": "EOT:", "additional_special_tokens": [{"content": "END!"}]}
    tokenizer = read(data, config | {"added_tokens_decoder": declared})
    assert {"EOT:", "END!", "HALT NOW"} <= tokenizer.control.keys()
    assert tokenizer.stop_ids == {tokenizer.control["EOT:"]} == {0}
    assert set(tokenizer.encode("EOT: END!")).isdisjoint(tokenizer.control.values())


THINKING = ("<|open|>", "<think>", "</think>", "[x]", "<|eos|>")


def thinking(shown: tuple[str, ...] = ("<think>", "</think>", "[x]")) -> dict[str, Any]:
    data = v.byte_level_json(THINKING, 1000, 8)
    for entry in data["added_tokens"]:
        entry["special"] = entry["content"] not in shown
    return data


@pytest.mark.parametrize(
    ("data", "config"),
    [
        (thinking(), {}),
        (thinking(THINKING), {"eos_token": "<|eos|>"}),
        (thinking(THINKING), {"additional_special_tokens": ["<think>"], "bos_token": "<|open|>"}),
        (thinking(), {"added_tokens_decoder": {"1": {"content": "<think>", "special": False}}}),
        (thinking(), {"added_tokens_decoder": {"1": {"content": "<think>", "special": True}}}),
    ],
)
def test_markers_that_no_file_calls_special_have_text_and_come_from_no_text(
    read: Read, data: dict[str, Any], config: dict[str, Any]
) -> None:
    """Their text is that of the tokenizers library without special tokens."""
    tokenizer = read(data, config)
    named = {config.get("eos_token"), config.get("bos_token")}
    named |= {*config.get("additional_special_tokens", ())}
    for entry in config.get("added_tokens_decoder", {}).values():
        named |= {entry["content"]} if entry["special"] else set()
    added = [{**t, "special": t["special"] or t["content"] in named} for t in data["added_tokens"]]
    library = tokenizers.Tokenizer.from_str(json.dumps({**data, "added_tokens": added}))
    rng = random.Random(12)
    for _ in range(50):
        ids = rng.choices(range(5), k=4) + rng.choices(range(8, 1000), k=4)
        rng.shuffle(ids)
        assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=True)
        stream = tokenizer.stream()
        assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)
        text = "".join(rng.choices([*THINKING, "a", " ", "<", "think>"], k=5))
        assert set(range(5)).isdisjoint(tokenizer.encode(text))
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.split("a<think>b") == [(None, "a"), (1, "b")]
    assert tokenizer.largest == 1007


def gapped(*added: tuple[str, int]) -> dict[str, Any]:
    data = v.byte_level_json(("<s>", "</s>"), 300, 2)
    data["added_tokens"] += [v.added(id, text, special=text[0] == "<") for text, id in added]
    return data


@pytest.mark.parametrize(
    "added",
    [
        (("<|a|>", 310), ("<|b|>", 311)),
        (("<|b|>", 302), ("<|a|>", 303)),
        (("<|a|>", 303), ("<|b|>", 302)),
        (("<|a|>", 305), ("   ", 320), ("<|b|>", 400)),
        (("<|a|>", 302), ("<|b|>", 304)),
    ],
)
@pytest.mark.parametrize("hole", [False, True])
def test_added_tokens_have_the_ids_of_the_file(
    read: Read, added: Any, hole: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """The library numbers those that the vocabulary lacks on from its size."""
    data = gapped(*added)
    if hole:
        vocab = {piece: id for piece, id in data["model"]["vocab"].items() if id != 299}
        data["model"] |= {"vocab": vocab, "merges": []}
    tokenizer = read(data, {"eos_token": "<|b|>"})
    for text, id in added:
        found = tokenizer.split(text)[-1][0] if text in tokenizer.control else None
        assert (found or tokenizer.encode(text)[0]) == id
        assert tokenizer.decode([id]) == ("" if text in tokenizer.control else text)
    assert tokenizer.stop_ids == {dict(added)["<|b|>"]}
    assert tokenizer.decode(tokenizer.encode("a <|a|> b")) == "a <|a|> b"
    assert capfd.readouterr() == ("", "")


def unigram(*added: tuple[str, int]) -> dict[str, Any]:
    """Of five pieces."""
    space = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"}
    pieces = {"<s>": 0.0, "<unk>": 0.0, "\u2581": -2.0, "\u2581a": -3.0, "b": -3.0}
    model = {"type": "Unigram", "unk_id": 1, "vocab": [*pieces.items()], "byte_fallback": False}
    listed = [v.added(id, text) for text, id in added or (("<s>", 0), ("<unk>", 1))]
    changes = {"normalizer": None, "pre_tokenizer": space, "decoder": space, "model": model}
    return v.legacy_json("v1") | changes | {"added_tokens": listed}


@pytest.mark.parametrize(
    ("data", "files", "said"),
    [
        (gapped(("<|a|>", 40)), {}, "has the id 40, which is that of"),
        (gapped(("<|a|>", 310), ("<|b|>", 310)), {}, "has the id 310, which is that of '<|a|>'"),
        (gapped(("<s>", 310)), {}, "'<s>' has the id 310, and the vocabulary gives it 0"),
        (gapped(("<|a|>", 302), ("<|a|>", 303)), {}, "'<|a|>' has the id 30"),
        (unigram(("<|a|>", 3)), {}, "'<|a|>' has the id 3, which is that of"),
        ("v1", {"<|a|>": 22557}, "the id 22,557, which is that of ' Hello'"),
    ],
)
def test_added_tokens_that_cannot_have_their_ids_are_refused_with_both(
    read: Read, data: Any, files: dict[str, int], said: str
) -> None:
    refused(
        lambda: read(data, files={"added_tokens.json": files}), "the added token ", said, code=6
    )


@pytest.mark.parametrize("named", [{}, {"pad_token": "hey"}])
@pytest.mark.parametrize("where", ["added_tokens.json", "declared", "declared special"])
@pytest.mark.parametrize("data", ["v1", v.byte_level_json(v.LLAMA_3, 1000, 8)])
def test_words_that_another_file_adds_have_text(
    read: Read, data: Any, where: str, named: dict[str, str]
) -> None:
    last = 32_000 if data == "v1" else 1008
    special, own = where == "declared special", where == "added_tokens.json"
    decoder = {last: {"content": "hey", "special": special}, last + 1: {"content": "\n  "}, 7: {}}
    config = named | ({} if own else {"added_tokens_decoder": decoder})
    tokenizer = read(data, config, {where: {"": 1, "hey": last, "\n  ": last + 1}} if own else {})
    silent = named or special
    assert tokenizer.decode([last, last + 1]) == ("\n  " if silent else "hey\n  ")
    assert tokenizer.decode(tokenizer.encode("hey  \n")) == "hey  \n"
    assert ("hey" in tokenizer.control) == bool(silent)
    assert tokenizer.vocab == last + 2


@pytest.mark.parametrize(
    ("own", "added", "declared", "said"),
    [
        (302, 302, 302, ""),
        (302, None, 302, ""),
        (None, 305, 305, ""),
        (302, 309, None, "302 in tokenizer.json, and 309 in added_tokens.json"),
        (302, None, 309, "302 in tokenizer.json, and 309 in tokenizer_config.json"),
        (None, 303, 309, "303 in added_tokens.json, and 309 in tokenizer_config.json"),
    ],
)
@pytest.mark.parametrize("text", ["<|a|>", "hey"])
def test_files_that_give_a_token_two_ids_are_refused(
    read: Read, text: str, own: int | None, added: int | None, declared: int | None, said: str
) -> None:
    config = {"added_tokens_decoder": {str(declared): {"content": text}}} if declared else {}
    files = {"added_tokens.json": {text: added}} if added else {}
    data = gapped((text, own)) if own else gapped()
    if said:
        refused(lambda: read(data, config, files), f"{text!r} has the id {said}", code=6)
    else:
        assert read(data, config, files).decode([max(own or 0, added or 0)]) in (text, "")


def test_the_unknown_token_of_a_unigram_vocabulary(read: Read) -> None:
    tokenizer, library = read(unigram()), tokenizers.Tokenizer.from_str(json.dumps(unigram()))
    library.encode_special_tokens = True
    for text in ("a b", "a \u4e2d b", "\u4e2d\u6587", "a<unk>b"):
        assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids
    assert 1 in tokenizer.encode("\u4e2d")
    assert tokenizer.lost("a \u4e2d\u6587 b") == 2


WORDS = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
PIECES = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
UNDERSCORED = json.dumps(v.legacy_json("v1") | {"decoder": PIECES}).replace("\\u2581", "_")
"""A vocabulary that spells a space as "_"."""
LOSSY = "the tokenizer drops or changes these characters of a text: "
DECODER = "the decoder of tokenizer.json is another vocabulary's: it is not used"


@cache
def first(entries: int) -> dict[str, Any]:
    return v.byte_level_json(v.LLAMA_3, entries)


def in_bytes(**changes: Any) -> dict[str, Any]:
    return {**first(1000), **changes}


def replaced(of: str, by: str) -> dict[str, Any]:
    return in_bytes(normalizer={"type": "Replace", "pattern": {"Regex": of}, "content": by})


@pytest.mark.parametrize(
    ("data", "lost"),
    [
        (v.first_json("v3"), ""),
        (in_bytes(normalizer={"type": "NFC"}), ""),
        (json.loads(UNDERSCORED), "punctuation"),
        (
            unigram(),
            "small letters, capitals, digits, punctuation, quotes and dashes, spaces, line ends, "
            "tabs, accents, Chinese, emoji, rare characters",
        ),
        (in_bytes(normalizer={"type": "Lowercase"}), "capitals, accents"),
        (in_bytes(normalizer={"type": "NFKC"}), "quotes and dashes"),
        (replaced("[0-9]", "0"), "digits"),
        (replaced("[0-9]", ""), "digits"),
        (replaced("[A-Z]", ""), "capitals"),
        (replaced("\\bq\\b", "k"), "small letters"),
        (replaced('"', "'"), "punctuation"),
        (replaced("[\u201c\u201d]", '"'), "quotes and dashes"),
    ],
)
def test_what_is_encoded_is_decoded_or_said_to_be_lost(read: Read, data: Any, lost: str) -> None:
    tokenizer = read(data)
    assert tokenizer.notes == ((LOSSY + lost,) if lost else ())
    text = 'two  words\n\u00e9\t\u4e2d \U0001f600 QZ 1998 "q" snake_case \u201cso\u2026\u201d'
    if lost:
        template = ChatTemplate.built_in("plain", tokenizer)
        assert template.lost(text) == tokenizer.lost(text) > 0
        assert tokenizer.lost("ab") == 0
    else:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.lost(text) == 0


LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPELLED = LLAMA.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "(?:'[sStTmMdD]|'[rRvV][eE]|'[lL]{2})")
QWEN = LLAMA.replace("{1,3}", "")
VENDORS = v.tekken(300)["config"]["pattern"]


def known(split: str, entries: int = 1000, **changes: Any) -> dict[str, Any]:
    """A vocabulary with the pieces by which that of a family is known."""
    data = first(entries) | changes
    ids = {s.name: s for s in split_patterns._SPLITS}[split].known
    return {**data, "model": {**data["model"], "vocab": {**data["model"]["vocab"], **ids}}}


def cut_by(*parts: Any) -> dict[str, Any]:
    """A pre-tokenizer of patterns and other parts."""
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    whole = [{**split, "pattern": {"Regex": p}} if isinstance(p, str) else p for p in parts]
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": whole}}


def rare(data: dict[str, Any]) -> dict[str, Any]:
    """A vocabulary without the bytes that UTF-8 does not have."""
    own = data["model"]["vocab"].items()
    vocab = {piece: id for piece, id in own if piece not in "\u00fe\u00ff"}
    return {**data, "model": {**data["model"], "vocab": vocab}}


SAVED = {"normalizer": None, "pre_tokenizer": WORDS, "decoder": PIECES}
"""What LlamaTokenizer of transformers 5 writes, also for a byte-level vocabulary."""
DIGITS = {"type": "Digits", "individual_digits": True}
UNPACKED = {**BYTES, "use_regex": False}
ANOTHER = "another program saved it"
SPACED = v.legacy_json("v1")
PACKED = cut_by(LLAMA, UNPACKED)
PLAIN, THOUGH = in_bytes(), "vocabularies do, though its vocabulary is one"
TEKKEN, AS_TEKKEN = known("tekken", 20_000), cut_by(VENDORS, UNPACKED)
AS_QWEN = cut_by(QWEN, UNPACKED)
AS_WORDS = {k: SPACED[k] for k in ("normalizer", "pre_tokenizer")} | {"decoder": PIECES}
NO_SPACES = cut_by({"type": "WhitespaceSplit"}, UNPACKED)
FUSE, BYTES_ONLY = {"decoder": {"type": "Fuse"}}, {"normalizer": None, "pre_tokenizer": BYTES}
# The file, what it says wrongly, what is right (None: refused), the family, and what is told.
LIES: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any] | None, str, str]] = [
    ("decoder of words", PLAIN, {"decoder": PIECES}, {}, "", DECODER),
    ("decoder of spaces", PLAIN, {"decoder": WORDS}, {}, "", DECODER),
    ("decoder of nothing", PLAIN, FUSE, {}, "", DECODER),
    ("decoder of bytes", SPACED, {"decoder": BYTES}, {}, "", DECODER),
    ("decoder that fuses", SPACED, FUSE, {}, "", DECODER),
    ("Mistral Small 3.1", TEKKEN, PACKED, AS_TEKKEN, "mistral", f"as tekken {THOUGH}"),
    ("R1-Distill-Llama, saved", known("Llama 3"), SAVED, PACKED, "llama", f"as Llama 3 {THOUGH}"),
    ("R1-Distill-Qwen, saved", known("Qwen 2"), SAVED, AS_QWEN, "qwen2", f"as Qwen 2 {THOUGH}"),
    ("no bytes", PLAIN, cut_by(LLAMA, DIGITS), cut_by(LLAMA, DIGITS, UNPACKED), "", "spells bytes"),
    ("SmolLM2, saved", rare(PLAIN), SAVED, None, "llama", "reads texts with Metaspace"),
    ("SmolLM2, decoder", rare(PLAIN), {"decoder": PIECES}, {}, "", DECODER),
    ("DeepSeek, saved", PLAIN, SAVED, None, "llama", "reads texts with Metaspace"),
    ("Llama 2's normalizer", PLAIN, AS_WORDS, None, "", "reads texts with Prepend and Replace"),
    ("none", PLAIN, {"pre_tokenizer": None}, None, "", "reads texts with no pre-tokenizer"),
    ("white space as a border", PLAIN, NO_SPACES, None, "", "loses the spaces"),
    ("bytes", SPACED, BYTES_ONLY, None, "", "loses the spaces"),
]


@pytest.mark.parametrize(
    ("data", "wrong", "right", "family", "said"), [pytest.param(*row, id=id) for id, *row in LIES]
)
def test_a_tokenizer_that_does_not_fit_its_vocabulary_is_read_as_that_needs_or_refused(
    read: Read, data: dict[str, Any], wrong: Any, right: Any, family: str, said: str
) -> None:
    if right is None:
        refused(lambda: read(data | wrong, family=family), said, ANOTHER, code=3)
        return
    tokenizer, honest = (read(data | one, family=family) for one in (wrong, right))
    assert honest.notes == ()
    assert [said in note for note in tokenizer.notes] == [True]
    for text in (split_patterns.SAMPLE, "  two'minikv\u00e9  \u4e2d\U0001f600 <|eot_id|>"):
        assert tokenizer.encode(text) == honest.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


DEEPSEEK = cut_by("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"\s+$", DIGITS, UNPACKED)


@pytest.mark.parametrize(
    ("data", "family"),
    [
        (in_bytes(decoder=BYTES), "llama"),
        (in_bytes(**cut_by(DIGITS, BYTES)), "llama"),  # SmolLM2
        (in_bytes(**DEEPSEEK, normalizer={"type": "Sequence", "normalizers": []}), "llama"),
        (known("Llama 3", **cut_by(SPELLED, UNPACKED)), "llama"),
        (known("tekken", **PACKED), "llama"),  # nobody knows
        (v.legacy_json("v3"), "mistral"),
        (v.first_json("v3"), "mistral"),
    ],
)
def test_nothing_is_said_of_a_tokenizer_that_fits(read: Read, data: Any, family: str) -> None:
    tokenizer = read(data, {"tokenizer_class": "LlamaTokenizerFast"}, family=family)
    assert tokenizer.notes == ()
    assert tokenizer.decode(tokenizer.encode(split_patterns.SAMPLE)) == split_patterns.SAMPLE


GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@pytest.mark.parametrize("parts", [{}, cut_by(DIGITS, BYTES)], ids=["patterns", "as published"])
def test_smollm_ids_are_those_of_another_program(read: Read, parts: dict[str, Any]) -> None:
    """Of SmolLM2's first 700 merges (Apache 2.0) and 1,000 texts. The ids come from pieces that
    Python's `regex` cut, at each digit and then as GPT-2, joined by a loop over the merges."""
    kept = json.loads((Path(__file__).parents[1] / "data/smollm.json").read_text("utf-8"))
    pieces = [*kept["special"], *kept["letters"], *(m.replace(" ", "") for m in kept["merges"])]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    added = [(text, id, True) for id, text in enumerate(kept["special"])]
    tokenizer = read(byte_level(vocab, kept["merges"], [r"\p{N}", GPT_2], added) | parts)
    assert len(kept["cases"]) == 1000
    assert [text for text, ids in kept["cases"] if tokenizer.encode(text) != ids] == []
    assert tokenizer.notes == ()


def split_by(pattern: str | None) -> dict[str, Any]:
    if pattern is None:
        return in_bytes(pre_tokenizer=None, decoder=BYTES, normalizer={"type": "ByteLevel"})
    data = v.byte_level_json(v.LLAMA_3, 1000)
    data["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern
    return data


@pytest.mark.parametrize(
    ("family", "rows", "pattern", "theirs"),
    [
        ("mistral", 131_072, VENDORS, None),
        ("mistral", 131_072, LLAMA, "tekken"),
        ("ministral", 131_074, QWEN, "tekken"),
        ("llama", 128_256, LLAMA, None),
        ("llama", 128_264, SPELLED, None),
        ("llama", 128_256, QWEN, "Llama 3"),
        ("llama", 128_256, VENDORS, "Llama 3"),
        ("llama", 128_256, None, "Llama 3"),
        ("qwen2", 152_064, QWEN, None),
        ("qwen2", 151_936, LLAMA, "Qwen 2"),
        # Nothing is known of these.
        ("llama", 49_152, VENDORS, None),
        ("llama", 131_072, LLAMA, None),
        ("mistral", 32_768, LLAMA, None),
    ],
)
def test_a_split_pattern_of_another_family_is_said(
    read: Read, family: str, rows: int, pattern: str | None, theirs: str | None
) -> None:
    notes = read(split_by(pattern), family=family, rows=rows).notes
    said = f"the tokenizer does not cut texts as {theirs} vocabularies do"
    assert [note.partition(":")[0] for note in notes] == ([said] if theirs else [])


def test_tokens_declared_beside_a_sentencepiece_file(read: Read) -> None:
    for text in ("\u2581Hello", " Hello"):  # a space is written as in the vocabulary, or as it is
        tokenizer = read("v1", files={"added_tokens.json": {text: 22557}})
        assert tokenizer.encode("Hello") == v.vendor("v1").encode("Hello") == [22557]
        assert tokenizer.decode([1, 22557]) == "Hello"
    added = {"<|im_start|>": 32001, "<|im_end|>": 32000, "<|\ud800|>": 32002}
    tokenizer = read("v1", {"eos_token": "<|im_end|>"}, {"added_tokens.json": added})
    assert tokenizer.vocab == 32003
    assert tokenizer.decode([32002]) == "<|?|>"
    assert tokenizer.stop_ids == {32000}
    assert tokenizer.split("<|im_start|>user") == [(None, ""), (32001, "user")]
    assert max(tokenizer.encode("<|im_start|>user<|im_end|>")) < 32000
    # Only the second is called special, so only it has no text.
    assert tokenizer.decode([32001, 22557, 32000]) == "<|im_start|> Hello"


def test_split_takes_the_white_space_that_a_token_takes(read: Read) -> None:
    data = v.byte_level_json(("<s>", "<left>", "<right>", "<whole>", "<s><s>"), 1000, 8)
    for index, flag in ((1, "lstrip"), (2, "rstrip"), (3, "single_word")):
        data["added_tokens"][index][flag] = True
    tokenizer = read(data)
    assert tokenizer.split("a <left> b <right> \n c") == [(None, "a"), (1, " b "), (2, "c")]
    assert tokenizer.split("<s><s><s>") == [(None, ""), (4, ""), (0, "")]
    assert tokenizer.split("x<whole> <whole>") == [(None, "x<whole> "), (3, "")]


# Neighbours of the ends of what `re` and UTF-8 treat alike, and characters with a meaning in `re`.
CHARACTERS = "ab-^]\\|\n<\u00e9\ud7ff\ud800\uffff\U00010000\U0001f600\U0010fffe\U0010ffff"


def test_the_search_finds_what_an_alternation_finds(part: float) -> None:
    """Of random tokens, many of which begin with others."""
    rng = random.Random(10)
    for _ in range(round(4000 * part)):
        few = "".join(rng.sample(CHARACTERS, rng.randrange(1, 5)))

        def text(most: int, few: str = few) -> str:
            return "".join(rng.choices(few, k=rng.randrange(most)))

        texts = [text(rng.choice([3, 8])) for _ in range(rng.randrange(12))]
        texts += [one[: rng.randrange(9)] for one in texts] + [one + text(4) for one in texts[:3]]
        longest_first = sorted({one for one in texts if one}, key=lambda one: (-len(one), one))
        oracle = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        search = TokenSearch(texts)
        assert search.longest == max(map(len, texts), default=0)
        for sample in (text(60), text(60) + rng.choice(CHARACTERS), "".join(texts)):
            expected = [(match.start(), match[0]) for match in oracle.finditer(sample)]
            assert list(search.find(sample)) == expected, (texts, sample)


def test_the_search_looks_at_most_once_at_each_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """An alternation compared the text at each of them with every token: of 90,000 tokens, 28,000
    characters took 8 seconds, during which no other thread ran."""
    looked = Mock(wraps=bisect_right)
    monkeypatch.setattr(vocabulary, "bisect_right", looked)
    search = TokenSearch(f"e{i:06}" for i in range(90_000))
    text = "e0" * 2000 + "e00000x" * 500 + "e012345" * 1000
    assert sum(1 for _ in search.find(text)) == 1000
    assert 1000 <= looked.call_count <= len(text) / 2
    assert len(search._candidate.pattern) < 100
    # `re` compares a character with each of those in a class; beyond the first plane it is a range.
    search = TokenSearch(chr(0x10000 + 2 * i) for i in range(50_000))
    assert len(search._candidate.pattern) == 5
    assert list(search.find("a\U00010001\U00010002")) == [(2, "\U00010002")]


def test_settings_that_alter_texts_are_off(read: Read) -> None:
    data = v.legacy_json("v1")
    library = tokenizers.Tokenizer.from_str(json.dumps(data))
    library.enable_truncation(4)
    library.enable_padding(length=64, pad_id=0, pad_token="<unk>")
    data |= {key: json.loads(library.to_str())[key] for key in ("truncation", "padding")}
    data["model"]["dropout"] = 0.99
    text = "a longer text with many more words than four"
    plain = loaded.tokenizer(v.legacy_json, "v1").encode(text)
    assert read(data).encode(text) == plain == v.vendor("v1").encode(text)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_outside_the_vocabulary_have_no_text(kind: str) -> None:
    tokenizer = loaded.tokenizer(*KINDS[kind])
    ids = tokenizer.encode("Hello world")
    beyond = [-1, -tokenizer.vocab, tokenizer.vocab, tokenizer.vocab + 99, 1 << 40]
    assert tokenizer.decode(beyond) == ""
    special = [id for text, id in tokenizer.control.items() if "REFERENCE" not in text]
    assert tokenizer.decode([*beyond, *ids, *beyond, *special]) == "Hello world"


@pytest.mark.parametrize("kind", [*KINDS, None])
def test_where_sentences_end(kind: str | None) -> None:
    """Not within a number, nor with a line; with the quotes and brackets behind a stop, however
    they are divided; before a control token also without a stop."""
    texts = "It cost 3.50 in v1.2.", " Was it dear?", ' ("No!")', " It was\nnot.\n", " So\n\n", "or"
    tokenizer = loaded.tokenizer(*KINDS[kind]) if kind else models.load(None).tokenizer
    ids = tokenizer.encode("".join(texts))
    ended = tokenizer.sentence_ends([*ids, min(tokenizer.stop_ids)])
    cuts = [0, *(at for at, ends in enumerate(ended, 1) if ends)]
    found = [tokenizer.decode(ids[a:b]).strip() for a, b in side_by_side(cuts)]
    assert found == [text.strip() for text in texts]


def test_no_tokenizer_and_formats_that_are_refused_by_name(tmp_path: Path) -> None:
    refused(lambda: Tokenizer.from_folder(tmp_path), "no tokenizer.json", code=3)
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\nIw== 2\n")
    refused(lambda: Tokenizer.from_folder(tmp_path), "tiktoken", code=3)
    (tmp_path / "tokenizer.model").unlink()
    (tmp_path / "tokenizer.json").mkdir()
    refused(lambda: Tokenizer.from_folder(tmp_path), "regular file", code=6)


def _replaces(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def _prepends(text: str) -> dict[str, Any]:
    return {"type": "Prepend", "prepend": text}


def _tokens(*texts: str) -> dict[str, Any]:
    listed = enumerate(texts, 1064)
    return {"added_tokens": [{"id": id, "content": text, "special": True} for id, text in listed]}


def _merging(prefix: str, *merges: Any, **model: Any) -> dict[str, Any]:
    """Pieces that continue a word have a prefix."""
    own = {"continuing_subword_prefix": prefix, "merges": [*merges]}
    return {"model": first(1000)["model"] | own | model}


def _charsmap(*texts: str) -> str:
    table = bytes(1024)
    targets = b"".join(text.encode() + b"\0" for text in texts)
    return base64.b64encode(len(table).to_bytes(4, "little") + table + targets).decode()


def _steps(step: dict[str, Any], times: int, part: str = "normalizer") -> dict[str, Any]:
    return {part: {"type": "Sequence", f"{part}s": [step] * times}}


EMPTY = {"type": "Replace", "pattern": {"Regex": "(?=.)"}, "content": "x"}
LONGER = {"type": "Precompiled", "precompiled_charsmap": _charsmap("a", "b" * 170)}
FEW_STARTS = [f"{i:03}" + "\U0001f600" * 500 for i in range(600)]
CUT = [["a \u0120"], [["a", "\u0120"]], [["a", ""]]]
TOO_MUCH: dict[str, tuple[dict[str, Any], str]] = {
    "steps that spell bytes": (_steps({"type": "ByteLevel"}, 4), "256 times as long"),
    "matches of no length": (_steps(EMPTY, 8), "256 times as long"),
    "a prefix of each piece": (_steps(_prepends("a" * 200), 1), "201 times as long"),
    "a map to long texts": (_steps(LONGER, 1), "170 times as long"),
    "compatible forms, twice": (_steps({"type": "NFKD"}, 2), "324 times"),
    "nine steps that grow": (_steps(_replaces("a", "a" * 10), 9), "times as long"),
    "a decoder that grows": (_steps(_replaces("a", "a" * 10), 3, "decoder"), "times as long"),
    "many steps": (_steps({"type": "Lowercase"}, 65), "too many parts"),
    "a long step": ({"normalizer": _prepends("a" * 2000)}, "too many parts"),
    "an empty pattern": ({"normalizer": _replaces("", "a")}, "replaces the empty text"),
    "a long token": (_tokens("<|" + "a" * 60_000 + "|>"), "60,004 characters"),
    "many tokens": (_tokens(*(f"<|{i}|>" for i in range(100_001))), "100,001 added tokens"),
    "much text": (_tokens(*(f"<|{i:0400}|>" for i in range(6000))), "than 2,097,152 characters"),
    "tokens that share no beginning": (_tokens(*FEW_STARTS), "than 1,048,576 different beginnings"),
    "many digits": ({"added_tokens": [{"id": 10**4200, "content": "<|a|>"}]}, "19 digits or more"),
    # The library would cut the character in two, and abort as it says so.
    **{
        f"no prefix {n}": (_merging("x", ["a", "xb"], *merge), "does not continue a word")
        for n, merge in enumerate(CUT)
    },
}


@pytest.mark.parametrize("merges", [[["a", "##b"]], ["#version: 0.2", "a ##b"]])
def test_pieces_that_continue_a_word_may_have_a_prefix(read: Read, merges: list[Any]) -> None:
    model = _merging("##", *merges, vocab={"a": 0, "##b": 1, "ab": 2}, ignore_merges=False)
    data = in_bytes(added_tokens=[], pre_tokenizer=None, **model)
    assert read(data).encode("ab", "after") == [2]


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_would_take_memory_or_time_is_refused_before_the_library_sees_it(
    read: Read, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, message = TOO_MUCH[name]
    monkeypatch.delattr("tokenizers.Tokenizer.from_str")
    refused(lambda: read(in_bytes(**changes)), message, code=6)
    if name == "tokens that share no beginning":  # also of words that another file calls special
        data = v.byte_level_json(v.LLAMA_3, 1000)
        data["model"]["vocab"] |= {piece: id for id, piece in enumerate(FEW_STARTS, 2000)}
        config = {"additional_special_tokens": FEW_STARTS}
        refused(lambda: read(data, config), "different beginnings", code=6)


@pytest.mark.parametrize(
    "texts",
    [
        [f"<|reserved_special_{i}|>" for i in range(80_000)],
        [f"e{i:06}" for i in range(90_000)],
        [chr(0x4E00 + i % 20_000) + chr(0x3041 + i // 20_000) * 2 for i in range(100_000)],
    ],
    ids=["numbered", "short", "words"],
)
def test_many_short_added_tokens_are_within_the_limits(texts: list[str]) -> None:
    check_added(texts, "t")


PANICS = {
    **{one: {"type": "Precompiled", "precompiled_charsmap": one} for one in ("////", "AAAA")},
    "brackets": {"type": "Replace", "pattern": {"Regex": "(" * 500}, "content": "a"},
}


@pytest.mark.parametrize("name", PANICS)
def test_what_makes_the_library_panic_is_an_error_of_the_file(read: Read, name: str) -> None:
    refused(lambda: read(in_bytes(normalizer=PANICS[name])), code=6)


@pytest.mark.parametrize("id", ["9" * 5000, "-1", "1e3", "²"], ids=lambda id: id[:9])
def test_ids_of_declared_tokens_are_small_numbers(read: Read, id: str) -> None:
    declared = {id: {"content": "<|new|>", "special": True}}
    refused(lambda: read(in_bytes(), {"added_tokens_decoder": declared}), "has the id", code=6)


@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer"])
def test_a_panic_for_some_text_is_an_error_of_the_file(read: Read, part: str) -> None:
    """Only a long text takes the expression more attempts than it may make."""
    slow = "(?:(?:q|q)+)+b"
    tokenizer = read(replaced(slow, "x") if part == "normalizer" else split_by(slow))
    assert tokenizer.decode(tokenizer.encode("a question")) == "a question"
    refused(lambda: tokenizer.encode("q" * 3000), "retry-limit", code=6, seconds=60)


def test_what_the_library_says_is_cut_before_it_is_held() -> None:
    with pytest.raises(CorruptModel) as caught, vocabulary.library_errors("t", "damaged"):
        raise ValueError("x" * 1_000_000)
    assert len(str(caught.value)) < 300
    assert len(repr(caught.value.__cause__)) < 300


BPE = b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, '
OPEN = b'{"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": false}'


def tekken(listed: Any = None, config: Any = (), **changes: Any) -> bytes:
    """A tekken.json with some of its keys, those of its configuration, or ranks changed."""
    data = v.tekken(300)
    data["config"] |= dict(config)
    data["vocab"] = [{**e, **changes.get(f"r{e['rank']}", {})} for e in data["vocab"]]
    data |= {key: value for key, value in changes.items() if key in data}
    return json.dumps(data | ({"special_tokens": listed} if listed else {})).encode()


def ranked(more: Iterable[bytes]) -> bytes:
    """A tekken.json with these pieces after the bytes."""
    data = v.tekken(256)
    texts = [base64.b64encode(piece).decode() for piece in more]
    vocab = [{"rank": 256 + n, "token_bytes": text} for n, text in enumerate(texts)]
    size = v.TEKKEN_SPECIALS + 256 + len(vocab)
    config = {**data["config"], "default_vocab_size": size}
    return json.dumps({"config": config, "vocab": data["vocab"] + vocab}).encode()


def listing(*texts: str, **first: Any) -> list[dict[str, Any]]:
    listed = [{"rank": id, "token_str": text} for id, text in enumerate(texts)]
    return [listed[0] | first, *listed[1:]]


MANY_WAYS = [b"a" * n + b"b" * m for n in range(110) for m in range(110) if n + m > 1]
BAD_TEKKENS = {
    "unexpected structure": (
        *(b"{}", tekken(vocab=7), tekken(vocab={}), tekken(["<s>"])),
        *(tekken(r7={"token_bytes": one}) for one in ("?", "\u00e9", None)),
        tekken(config={"default_vocab_size": "many"}),
    ),
    "not a usable tokenizer": tuple(
        tekken(config={"pattern": pattern}) for pattern in ("(", "(?<a", None, {})
    ),
    "has the rank 8 at place 7": (tekken(r7={"rank": 8}),),
    "has 1 pieces twice": (tekken(r299={"token_bytes": "AA=="}),),
    "has no piece for the byte 7": (tekken(r7={"token_bytes": "QUJDREVGRw=="}),),
    "a piece of 0 bytes": (tekken(r299={"token_bytes": ""}),),
    "a piece of 600 bytes": (tekken(r299={"token_bytes": "AAAA" * 200}),),
    "of 256 bytes, or too many": (ranked(bytes([n % 251, n // 251]) * 128 for n in range(9000)),),
    "more than 1,000,000 ways": (ranked(MANY_WAYS),),
    "has 300 of the 5,000 pieces": (tekken(config={"default_vocab_size": 6000}),),
    "2,000,000,000 of them": (tekken(config={"default_num_special_tokens": 2 * 10**9}),),
    "-3 of them": (tekken(config={"default_num_special_tokens": -3}),),
    "has 4,000,000,000 ids": (tekken(config={"default_vocab_size": 4 * 10**9}),),
    "lists no special_tokens": (tekken(config={"version": "v11"}),),
    "'halt', which is a word": (tekken(listing("<s>", "halt")),),
    "each of its 1,000 control tokens one id": (
        tekken(listing("<s>", "<s>")),
        tekken(listing("<s>", "</s>", rank=1)),
        tekken(listing("<s>", "</s>", rank=10**30)),
        tekken(listing(*(f"<{n}>" for n in range(1001)))),
        tekken(listing("<s>", "<SPECIAL_7>")),
    ),
}
DAMAGED = [
    (name, content)
    for name, contents in {
        "tokenizer.json": [
            *(b"", b"{", b"[]", b"{}", b"\xff\xfe{", b"[" * 100_000, b'{"model": {"type": "BPE"}}'),
            b'{"model": 3, "added_tokens": []}',
            b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}',
            b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["x"]]}}',
            b'{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
            b'{"model": {"type": "BPE", "vocab": {"a": 4000000000}, "merges": []}}',
            BPE + b'"added_tokens": [{"id": 99999999999, "content": "b"}]}',
            BPE + b'"added_tokens": [7]}',
            BPE + b'"decoder": {"type": "Nonsense"}}',
            BPE + b'"pre_tokenizer": ' + OPEN + b"}",
        ],
        "tokenizer.model": [
            *(
                b"",
                b"not a model",
                b"\x00" * 4096,
                b"\x0a\xff\xff\xff\xff\x0f",
                b"\x1a\x02\x18\x00",
            ),
        ],
        "tokenizer_config.json": [
            *(b"{", b"[]", b'{"added_tokens_decoder": {"-4": {"content": "<a>"}}}'),
        ],
        "special_tokens_map.json": [b"7"],
        "added_tokens.json": [b'{"<a>": "x"}', b'{"<a>": 99999999999}'],
    }.items()
    for content in contents
]


@pytest.mark.parametrize("said", BAD_TEKKENS)
def test_a_damaged_tekken_json_is_refused_in_one_line(tmp_path: Path, said: str) -> None:
    for content in BAD_TEKKENS[said]:
        (tmp_path / "tekken.json").write_bytes(content)
        # A million ways to join pieces take one second to count, and two beside other processes.
        error = refused(lambda: Tokenizer.from_folder(tmp_path), said, code=6, seconds=4)
        assert str(error).startswith("tekken.json")


@pytest.mark.parametrize(("name", "content"), DAMAGED)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    if not name.startswith("tokenizer."):
        v.write_folder(tmp_path, "v1")
    (tmp_path / name).write_bytes(content)
    error = refused(lambda: Tokenizer.from_folder(tmp_path), code=6)
    assert name in str(error) or "added token" in str(error)
