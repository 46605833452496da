"""Real vocabularies for the text tests, and conversions between their file formats.

They are the ones shipped inside mistral_common: sentencepiece files v1 (32,000 pieces), v3 and v7
(32,768), and the ranks of tekken (131,072 byte-level entries). The conversions are written from
the descriptions of the formats, so that one format can be checked against another.
"""

from __future__ import annotations

import base64
import json
import random
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import sentencepiece
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from minikv.models.stream import byte_level_alphabet

_FILES = {
    "v1": "tokenizer.model.v1",
    "v3": "mistral_instruct_tokenizer_240323.model.v3",
    "v7": "mistral_instruct_tokenizer_241114.model.v7",
}
TEKKEN = "tekken_240718.json"
REAL = (
    "tokenizer.model.v1",
    "mistral_instruct_tokenizer_240216.model.v2",
    "mistral_instruct_tokenizer_240323.model.v3",
    "mistral_instruct_tokenizer_241114.model.v7",
    "mistral_instruct_tokenizer_241114.model.v7m1",
    TEKKEN,
    "tekken_240911.json",
)
"""All seven that mistral_common ships."""
_MARKS = "begin_of_text end_of_text start_header_id end_header_id eot_id eom_id python_tag"
LLAMA_3 = tuple(f"<|{name}|>" for name in _MARKS.split())
NEMO = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
FORMATS = "llama-2 llama-3 mistral-v1 mistral-v3 mistral-v7 chatml zephyr plain".split()
"""Names of built-in chat formats."""


def vendor_file(version: str) -> Path:
    return Path(str(files("mistral_common"))) / "data" / _FILES.get(version, version)


@cache
def vendor(version: str) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(vendor_file(version)))


def added(id: int, content: str, **flags: bool) -> dict[str, Any]:
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": id, "content": content, **usual, "special": True, **flags}


@cache
def _word_pieces(version: str) -> str:
    """The sentencepiece file as the tokenizer.json that transformers 4 published."""
    model = vendor(version)
    count = model.vocab_size()
    pieces = [model.id_to_piece(id) for id in range(count)]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    fixed = [id for id in range(count) if model.is_control(id) or model.is_unknown(id)]
    normal = [id for id in range(count) if id not in fixed and not model.is_byte(id)]
    # The 20 user-defined pieces of v3 have score 0 like the best merge, but no merge makes them.
    own = [id for id in normal if pieces[id].startswith("[REFERENCE_DOC_")]
    known = {pieces[id] for id in normal} - {pieces[id] for id in own}
    merges: list[tuple[str, str]] = []
    for id in sorted(set(normal) - set(own), key=model.get_score, reverse=True):
        piece = pieces[id]
        halves = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        found = [(a, b) for a, b in halves if a in known and b in known]
        merges += sorted(found, key=lambda ab: (vocab[ab[0]], vocab[ab[1]]))
    bytes_ = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    made = Tokenizer(models.BPE(vocab, merges, **bytes_))
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    made.normalizer = normalizers.Sequence(spaces)
    space, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    made.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), strip])
    made.add_special_tokens([_special(pieces[id]) for id in sorted([*fixed, *own])])
    return made.to_str()


def _special(content: str) -> AddedToken:
    return AddedToken(content, normalized=False, special=True)


def legacy_json(version: str) -> dict[str, Any]:
    """A space before the text after every control token (Llama-2, Mistral v0.1)."""
    found: dict[str, Any] = json.loads(_word_pieces(version))
    return found


def first_json(version: str) -> dict[str, Any]:
    """A space before the first text only (Mistral v0.3)."""
    data = legacy_json(version)
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    return data | {"normalizer": None, "pre_tokenizer": space}


TEKKEN_SPECIALS = 1000


@cache
def _first_ranks(count: int) -> str:
    """The vendor's tekken.json, cut."""
    data = json.loads(vendor_file(TEKKEN).read_text("utf-8"))
    config = data["config"]
    size = min(count + TEKKEN_SPECIALS, config["default_vocab_size"])
    cut = {"config": {**config, "default_vocab_size": size}, "vocab": data["vocab"][:count]}
    return json.dumps(cut)


def tekken(ranks: int = 2000, version: str = "v3", listed: tuple[str, ...] = ()) -> dict[str, Any]:
    """The vendor's tekken.json with its first ranks, perhaps as one that lists its control tokens:
    those that older files imply, and these."""
    made: dict[str, Any] = json.loads(_first_ranks(ranks))
    made["config"]["version"] = version
    if listed:
        implied = [token["token_str"] for token in Tekkenizer.DEPRECATED_SPECIAL_TOKENS]
        names = enumerate([*map(str, implied), *listed])
        made["special_tokens"] = [
            {"rank": id, "token_str": name, "is_control": True} for id, name in names
        ]
    return made


@cache
def _tekken() -> tuple[str, list[bytes]]:
    data = json.loads(vendor_file(TEKKEN).read_text("utf-8"))
    count = data["config"]["default_vocab_size"] - TEKKEN_SPECIALS
    ranks = [base64.b64decode(entry["token_bytes"]) for entry in data["vocab"][:count]]
    return data["config"]["pattern"], ranks


@cache
def _byte_level(specials: tuple[str, ...], entries: int, count: int) -> str:
    pattern, ranks = _tekken()
    ranks = ranks[:entries]
    order = {token: rank for rank, token in enumerate(ranks)}
    letters = {byte: char for char, byte in byte_level_alphabet().items()}
    names = [*specials, *(f"<SPECIAL_{n}>" for n in range(len(specials), count))]

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    vocab = {name: id for id, name in enumerate(names)}
    vocab |= {spell(token): count + rank for rank, token in enumerate(ranks)}
    longer = ((rank, token) for rank, token in enumerate(ranks) if len(token) > 1)
    merges = [tuple(map(spell, _last_merge(token, rank, order))) for rank, token in longer]
    made = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([_special(name) for name in names])
    return made.to_str()


def _last_merge(token: bytes, limit: int, order: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two parts that a token is made of when only earlier ranks may merge."""
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 2:
        pairs = enumerate(pairwise(parts))
        rank, at = min((order.get(one + two, limit), n) for n, (one, two) in pairs)
        assert rank < limit, token
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def byte_level_json(
    specials: tuple[str, ...] = LLAMA_3, entries: int = 20_000, count: int = 64
) -> dict[str, Any]:
    """Byte-level BPE of the first tekken ranks, `count` special tokens first."""
    found: dict[str, Any] = json.loads(_byte_level(specials, entries, count))
    return found


def write_folder(
    folder: Path, tokenizer: dict[str, Any] | str, config: dict[str, Any] | None = None
) -> Path:
    """A model folder's text files: a tokenizer.json, a tekken.json, or one of the vendor's files by
    its version."""
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(tokenizer, str):
        name = "tekken.json" if tokenizer.startswith("tekken") else "tokenizer.model"
        (folder / name).write_bytes(vendor_file(tokenizer).read_bytes())
    else:
        name = "tekken.json" if "config" in tokenizer else "tokenizer.json"
        (folder / name).write_text(json.dumps(tokenizer), "utf-8")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return folder


_WORDS = (
    *"""
    the and of Marvel report 2024 3.14 Zürich naïve été straße ПРИВЕТ мир שלום مرحبا नमस्ते 你好
    世界 日本語 한국어 ไทย 🇨🇭 🤗 é ﬁ ½ ² Ⅷ İ ß x=y*2 foo_bar() http://a.b?d=1&e don't HTML <b>
    </b> {{ }} {% raw %} %s ' ` ~ ^ � <0x0A>
    """.split(),
    *("\U0001f469\u200d\U0001f467", "\\n", '"', "\uffff", "\u200b", "\ufeff"),
    *("\xa0", "\x00", "\x7f", "\x85"),
)
_GAPS = ("", " ", " ", " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", " \n ", "        ", "\u3000")


def random_text(rng: random.Random, extra: tuple[str, ...] = (), longest: int = 12) -> str:
    """Words of many scripts, runs of white space, stray characters and some of `extra`."""
    parts = []
    for _ in range(rng.randrange(longest + 1)):
        draw = rng.random()
        if extra and draw < 0.3:
            parts.append(rng.choice(extra))
        elif draw < 0.8:
            parts.append(rng.choice(_WORDS))
        elif draw < 0.9:
            parts.append("".join(rng.choices("abcdefgXYZ0123456789,.;:!?-<>[]|/_", k=6)))
        else:
            ranges = (0x20, 0x250), (0x20, 0xD800), (0xE000, 0x110000)
            code = rng.choice([rng.randrange(*ends) for ends in ranges])
            parts.append(chr(code) * rng.choice([1, 1, 2, 5]))
        parts.append(rng.choice(_GAPS))
    return "".join(parts)
