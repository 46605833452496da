"""Reads `tokenizer.json` with the tokenizers library, so that a text never produces control
tokens."""

from __future__ import annotations

import base64
import binascii
import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import tokenizers

from minikv.models.errors import CorruptModel, UnsupportedModel, quote
from minikv.models.split_patterns import SAMPLE, family_split
from minikv.models.stream import byte_level_alphabet, byte_level_bytes, word_piece_bytes
from minikv.models.vocabulary import (
    LARGEST_ID,
    Place,
    Prefix,
    check_added,
    is_marker,
    library_errors,
    lost,
    text_of,
)

_PARTS = 64  # most parts of a normalizer, pre-tokenizer or decoder; published ones have up to ten
_WRITTEN = 1024  # most characters that a part may write at a time
_GROWTH = 128  # the most times that a text may grow
_GROWS = {"ByteLevel": 4.0, "NFC": 3.0, "NFD": 4.0, "NFKC": 18.0, "NFKD": 18.0}
"""The factor by which each of these parts can lengthen a text: ByteLevel writes one character per
byte, the others follow Unicode."""
_PROBES = ("A b\n", "\u00e9\ufb01 \u4e2d\u6587 \U0001f600", " " * 100 + "a" * 2000)
_BPE_OPTIONS = """
dropout unk_token continuing_subword_prefix end_of_word_suffix fuse_unk byte_fallback ignore_merges
""".split()
_VERSION = "#version"  # the beginning of the first line of a merges file
_ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
Added = tuple[str, int, bool]
"""A control or added token: its text, its id, and whether the text is not shown."""
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def byte_level(
    vocab: Mapping[str, int],
    merges: Iterable[Any],
    patterns: Iterable[str],
    added: Iterable[Added] = (),
    whole: bool = False,
    composes: bool = False,
) -> dict[str, Any]:
    """The content of a `tokenizer.json` for a byte-level vocabulary: the argument of
    `JsonVocabulary`.

    vocab: pieces in the byte-level alphabet, with their ids. merges: pairs of pieces, or both with
    a space between them. patterns, whole, composes: see `split_patterns.Cuts`.
    """
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    cutters = [{**split, "pattern": {"Regex": pattern}} for pattern in patterns]
    return {
        "added_tokens": _listed(added),
        "normalizer": {"type": "NFC"} if composes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cutters, _BYTES]},
        "decoder": _BYTES,
        "model": {"type": "BPE", "vocab": vocab, "merges": [*merges], "ignore_merges": whole},
    }


def pieces_of_words(
    vocab: Mapping[str, int],
    merges: Iterable[Any],
    added: Iterable[Added],
    unknown: str | None,
    prefix: bool,
) -> dict[str, Any]:
    """Like `byte_level`, for a sentencepiece vocabulary. prefix: whether a text gets a space in
    front."""
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    first = [{"type": "Prepend", "prepend": "\u2581"}] if prefix else []
    back = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": int(prefix), "stop": 0}
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]
    model = {"type": "BPE", "vocab": vocab, "merges": [*merges], "unk_token": unknown}
    return {
        "added_tokens": _listed(added),
        "normalizer": {"type": "Sequence", "normalizers": [*first, space]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {**model, "byte_fallback": True, "fuse_unk": True},
    }


def _listed(added: Iterable[Added]) -> list[dict[str, Any]]:
    return [{**_ADDED, "id": id, "content": text, "special": mute} for text, id, mute in added]


def joined(pieces: Iterable[str], vocab: Mapping[str, int]) -> Iterator[list[str]]:
    """A merge for each way to form a piece from two others, in the order of the pieces."""
    for piece in pieces:
        for at in range(1, len(piece)):
            if piece[:at] in vocab and piece[at:] in vocab:
                yield [piece[:at], piece[at:]]


class JsonVocabulary:
    """The content of a `tokenizer.json`, as a dictionary. named: strings that the folder's other
    files add or call special. family and rows: the model's model_type, and the rows of its
    embedding.

    If a file does not fit its own vocabulary, it is read in the way that the vocabulary needs, with
    a note. Raises CorruptModel, and UnsupportedModel if no right way to read it is known."""

    def __init__(
        self,
        data: dict[str, Any],
        name: str = "tokenizer.json",
        named: Iterable[str] = (),
        family: str = "",
        rows: int = 0,
    ) -> None:
        self._name = name
        self.notes: tuple[str, ...] = ()
        with library_errors(name, "unexpected structure"):
            check_added([str(t["content"]) for t in data.get("added_tokens") or []], name)
            _check_growth(data, name)
            _check_merges(data["model"], name)
            quiet = {str(t["content"]) for t in data.get("added_tokens") or [] if t.get("special")}
            data = _prepared(data, frozenset(named))
            added = {str(token["content"]): token for token in data["added_tokens"]}
            largest = max((int(token["id"]) for token in added.values()), default=-1)
        if largest >= LARGEST_ID:
            id_text = str(largest) if largest < 10**18 else "19 digits or more"
            raise CorruptModel(f"{name} has a token id of {id_text}")
        self._backends: dict[Place, tokenizers.Tokenizer] = {}
        with library_errors(name, "not a usable tokenizer"):
            data = self._fitted(data, frozenset(added), family, rows)
            self._model = _model(data["model"])
            start = _backend(data, self._model)
            for text in _PROBES:
                start.encode_batch_fast([text], add_special_tokens=False)
            self._backends["start"] = start
            ids = _ids(data, start, name)
        if not ids or max(ids.values()) >= LARGEST_ID or min(ids.values()) < 0:
            raise CorruptModel(f"{name} has no usable vocabulary")
        self._ids = ids
        self.size = max(ids.values()) + 1
        with library_errors(name, "unexpected structure"):
            self.prefix = _prefix(data)
            self._backends["after"] = self._variant(data, first_only=True)
            self._backends["inside"] = self._variant(data, first_only=False)
            special = [text for text, token in added.items() if token["special"] and text in ids]
            self.control = {text: ids[text] for text in special if not self._is_word(text)}
            self.unknown = _unknown(data["model"], ids)
            self._quiet = frozenset(self.control[text] for text in quiet & self.control.keys())
            self._choose_table(data, frozenset(added))
        self.edges = {
            text: (bool(token["lstrip"]), bool(token["rstrip"]), bool(token["single_word"]))
            for text, token in added.items()
            if text in self.control
        }

    def encode(self, text: str, place: Place) -> list[int]:
        """The ids of a text, in which no control token is recognised. Raises CorruptModel."""
        with library_errors(self._name, "the text cannot be encoded"):
            # The fast form computes no offsets, which would take 100 bytes per token.
            found = self._backends[place].encode_batch_fast([text], add_special_tokens=False)
            ids: list[int] = found[0].ids
        return ids

    def find(self, piece: str) -> int | None:
        """The id of a vocabulary entry; None if there is no such entry."""
        return self._ids.get(piece)

    def _fitted(
        self, data: dict[str, Any], added: frozenset[str], family: str, rows: int
    ) -> dict[str, Any]:
        """The file's content, with the pre-tokenizer that its vocabulary needs."""
        model, kinds = data["model"], {part["type"] for part in _parts(data)}
        vocab = model["vocab"] if isinstance(model.get("vocab"), dict) else {}
        split = family_split(family, rows, vocab)
        if split is not None and ("ByteLevel" not in kinds or _cuts(data) != split.cuts()):
            said = f"the tokenizer does not cut texts as {split.name} vocabularies do"
            if split.certain(vocab):
                self.notes += (f"{said}, though its vocabulary is one: minikv does",)
                fitting = byte_level(vocab, model["merges"], [split.pattern], whole=split.whole)
                return {**fitting, "added_tokens": data["added_tokens"]}
            self.notes += (f"{said}: some words get ids that the model was not trained with",)
        if "ByteLevel" in kinds or not _spells_bytes(vocab, added):
            return data
        if "Split" not in kinds or kinds - {"Split", "Digits", "NFC"}:
            by = quote(" and ".join(sorted(kinds)) or "no pre-tokenizer")[1:-1]
            raise self._unfit(f"reads texts with {by}, and its vocabulary spells bytes")
        self.notes += (f"{self._name} omits that its vocabulary spells bytes: minikv adds that",)
        cutters = [*_components(data["pre_tokenizer"]), _BYTES]
        return {**data, "pre_tokenizer": {"type": "Sequence", "pretokenizers": cutters}}

    def _unfit(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self._name} {what}: another program saved it, and the right reading is not known",
            "get the tokenizer.json that the model was published with",
        )

    def _is_word(self, text: str) -> bool:
        # The padding token is often an ordinary word, like "!", which texts may use.
        return not is_marker(text) and self.encode(text, "inside") == [self._ids[text]]

    def _variant(self, data: dict[str, Any], first_only: bool) -> tokenizers.Tokenizer:
        """The same vocabulary for texts that are not at the very start. first_only: for texts after
        a control token, which removes only a prefix that is meant for the very first text;
        otherwise for texts inside a text, which removes every prefix."""
        bare = copy.deepcopy({key: data[key] for key in ("normalizer", "pre_tokenizer")})
        if not first_only:
            bare["normalizer"] = _without_prepend(bare["normalizer"])
        for part in _components(bare["pre_tokenizer"]):
            if part["type"] == "Metaspace" and (not first_only or _scheme(part) == "first"):
                part.update(prepend_scheme="never", add_prefix_space=False)
            elif part["type"] == "ByteLevel" and not first_only:
                part["add_prefix_space"] = False
        if all(bare[key] == data[key] for key in bare):
            return self._backends["start"]
        return _backend({**data, **bare}, self._model)

    def _choose_table(self, data: dict[str, Any], added: frozenset[str]) -> None:
        """Set `pieces` and `drop_space` according to the decoder, or according to the spelling of
        the pieces if that restores more of a text."""
        decoders = list(_components(data.get("decoder")))
        kinds = {part["type"] for part in decoders}
        unsupported = kinds - {"ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}
        if unsupported:
            raise UnsupportedModel(
                f"{self._name}: the decoder {', '.join(sorted(unsupported))} is not supported"
            )
        if not kinds:
            kinds = {part["type"] for part in _components(data.get("pre_tokenizer"))}
        self.drop_space = any(
            part["type"] == "Metaspace" and _scheme(part) != "never" for part in decoders
        )
        self.drop_space |= any(
            part["type"] == "Strip" and part.get("content") == " " and part.get("start", 0) >= 1
            for part in decoders
        )
        space = next(filter(None, map(_space, decoders)), "▁")
        fallback = bool(data["model"].get("byte_fallback")) or "ByteFallback" in kinds

        spelled: Callable[[str], bytes] = _plain
        if "ByteLevel" in kinds:
            spelled = byte_level_bytes
        elif kinds & {"Metaspace", "Replace"}:
            spelled = partial(word_piece_bytes, byte_fallback=fallback, space=space)
        self.pieces = self._table(spelled, added)
        missing = lost(self)
        if not missing:
            return
        declared = self.pieces, self.drop_space
        if _spells_bytes(self._ids, added):
            self.pieces, self.drop_space = self._table(byte_level_bytes, added), False
        else:
            self.pieces = self._table(lambda piece: word_piece_bytes(piece, fallback), added)
            self.drop_space = self.prefix != "never"
        if len(lost(self)) < len(missing):
            self.notes += (f"the decoder of {self._name} is another vocabulary's: it is not used",)
        else:
            self.pieces, self.drop_space = declared
        words = text_of(self.encode("two words", "start"), self.pieces, self.drop_space)
        if re.fullmatch("two[^ ]*words", words):
            raise self._unfit("loses the spaces between words")

    def _table(self, spelled: Callable[[str], bytes], added: frozenset[str]) -> list[bytes]:
        pieces = [b""] * self.size
        for piece, id in self._ids.items():
            pieces[id] = spelled(piece)
        for piece in added & self._ids.keys():
            id = self._ids[piece]
            pieces[id] = b"" if id in self._quiet else _plain(piece)
        return pieces


def _plain(piece: str) -> bytes:
    return piece.encode("utf-8", "replace")


def _spells_bytes(vocab: Mapping[str, int], added: frozenset[str]) -> bool:
    """Whether this is a byte-level vocabulary, which may lack rare bytes. added: pieces in plain
    text."""
    letters = byte_level_alphabet().keys()
    return len(letters & vocab.keys()) > 128 and not any(
        set(piece) - letters for piece in vocab.keys() - added
    )


def _cuts(data: dict[str, Any]) -> list[tuple[int, int]]:
    """Where the file's pre-tokenizer cuts `SAMPLE`."""
    cutter = _backend({"pre_tokenizer": data.get("pre_tokenizer")}).pre_tokenizer
    return [] if cutter is None else [span for _, span in cutter.pre_tokenize_str(SAMPLE)]


def _model(model: dict[str, Any]) -> tokenizers.models.Model:
    """The library's form of a file's model."""
    if model.get("type") != "BPE":
        made: tokenizers.models.Model = tokenizers.Tokenizer.from_str(
            json.dumps({"model": model})
        ).model
        return made
    # Directly, because the library takes twice as long to read JSON.
    merges = model["merges"]
    if merges and isinstance(merges[0], str):
        merges = (line.split(" ") for line in merges if not line.startswith(_VERSION))
    options = {name: model[name] for name in _BPE_OPTIONS if model.get(name) is not None}
    return tokenizers.models.BPE(model["vocab"], [*map(tuple, merges)], **options)


def _backend(
    data: dict[str, Any], model: tokenizers.models.Model | None = None
) -> tokenizers.Tokenizer:
    """The library's tokenizer for the content of a file, with this model instead of the file's. The
    added tokens have the ids of the file: the library itself would number those that the model
    lacks from its size on."""
    added = {token["content"]: token["id"] for token in data.get("added_tokens", ())}
    words = {"type": "WordLevel", "vocab": added, "unk_token": ""}
    backend = tokenizers.Tokenizer.from_str(json.dumps({**data, "model": words}))
    backend.encode_special_tokens = True
    if model is not None:
        backend.model = model
    return backend


def _prepared(data: dict[str, Any], named: frozenset[str]) -> dict[str, Any]:
    """The file's content with all markers flagged as special, and without truncation, padding and
    dropout, which would change texts or ids."""
    # A saved truncation would silently cut a document; a saved padding would lengthen it.
    model = dict(data["model"])
    if model.get("dropout"):
        model["dropout"] = None
    vocab = model.get("vocab")
    added = []
    for token in data.get("added_tokens") or []:
        content = str(token["content"])
        special = bool(token.get("special")) or content in named or is_marker(content)
        added.append({**_ADDED, **token, "special": special})
    known = {token["content"] for token in added}
    if isinstance(vocab, dict):
        added += [
            {**_ADDED, "id": vocab[piece], "content": piece, "special": True}
            for piece in sorted(named)
            if piece in vocab and piece not in known
        ]
    added.sort(key=lambda token: int(token["id"]))
    return {**data, "model": model, "added_tokens": added, "truncation": None, "padding": None}


def _ids(data: dict[str, Any], backend: tokenizers.Tokenizer, name: str) -> dict[str, int]:
    """All pieces and added tokens. Raises CorruptModel if the file gives an added token two ids, or
    the id of a piece."""
    vocab = data["model"].get("vocab")
    ids = {**vocab} if isinstance(vocab, dict) else backend.get_vocab(with_added_tokens=False)
    if not {bool}.isdisjoint(map(type, ids.values())):
        raise CorruptModel(f"{name}: an id in its vocabulary is not a number")
    owners: dict[int, str] = {}
    for token in data["added_tokens"]:
        text, id = str(token["content"]), int(token["id"])
        if text and text not in ids:
            owners = owners or {id: piece for piece, id in ids.items()}
            if owners.setdefault(id, text) != text:
                raise _misplaced(name, text, id, f"which is that of {quote(owners[id], 40)}")
            ids[text] = id
        elif text and ids[text] != id:
            raise _misplaced(name, text, id, f"and the vocabulary gives it {ids[text]}")
    return ids


def _misplaced(name: str, text: str, id: int, why: str) -> CorruptModel:
    return CorruptModel(f"{name}: the added token {quote(text, 40)} has the id {id:,}, {why}")


def _unknown(model: dict[str, Any], ids: dict[str, int]) -> int | None:
    """The id for text that the vocabulary cannot spell: Unigram gives its index, the others its
    string."""
    found = model.get("unk_id") if model.get("type") == "Unigram" else model.get("unk_token")
    return found if isinstance(found, int) else ids.get(found) if isinstance(found, str) else None


def _components(part: Any) -> Iterator[dict[str, Any]]:
    """The parts of a normalizer, pre-tokenizer or decoder, with nested sequences flattened."""
    if part is None:
        return
    for key in ("normalizers", "pretokenizers", "decoders"):
        if part.get("type") == "Sequence" and key in part:
            for inner in part[key]:
                yield from _components(inner)
            return
    yield part


def _check_growth(data: dict[str, Any], name: str) -> None:
    """Raise CorruptModel if the parts can make a short text very long: the growth of each part
    multiplies that of the others."""
    for key in ("normalizer", "pre_tokenizer", "decoder"):
        growth = 1.0
        for count, part in enumerate(_components(data.get(key)), 1):
            written = str(part.get("content") or part.get("prepend") or "")
            if count > _PARTS or len(written) > _WRITTEN:
                raise CorruptModel(f"{name}: the {key} has too many parts, or too long ones")
            if part["type"] == "Replace":
                found = part.get("pattern")
                text = found.get("String") if isinstance(found, dict) else found
                if text == "":
                    raise CorruptModel(f"{name}: the {key} replaces the empty text")
                # A regular expression may match between any two characters.
                growth *= max(1.0, len(written) / len(text)) if text else 1.0 + len(written)
            elif part["type"] == "Prepend":
                # It is put before each piece between added tokens; a piece may be one character.
                growth *= 1.0 + len(written)
            elif part["type"] == "Precompiled":
                growth *= _longest_target(part["precompiled_charsmap"])
            else:
                growth *= _GROWS.get(part["type"], 1.0)
        if growth > _GROWTH:
            raise CorruptModel(f"{name}: the {key} makes a text {growth:,.0f} times as long")


def _check_merges(model: dict[str, Any], name: str) -> None:
    """Raise CorruptModel if the second piece of a merge does not begin with the continuing prefix.
    The library removes that many bytes without a check, and aborts the process if that splits a
    character."""
    prefix = model.get("continuing_subword_prefix")
    if not prefix:
        return
    for merge in model.get("merges") or []:
        if merge[: len(_VERSION)] == _VERSION:
            continue
        piece = merge.partition(" ")[2] if isinstance(merge, str) else str(merge[-1])
        if not piece.startswith(prefix):
            raise CorruptModel(f"{name}: a merge adds a piece that does not continue a word")


def _longest_target(charsmap: str) -> float:
    """The most characters that a sentencepiece character map writes for one character. The data
    consists of the length of a table, the table, and all texts that the map writes, each followed
    by a zero byte."""
    try:
        data = base64.b64decode(charsmap, validate=True)
    except binascii.Error:
        return 1.0  # the library refuses it
    texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
    return max(1.0, *(float(len(text.decode("utf-8", "replace"))) for text in texts))


def _parts(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from _components(data.get("normalizer"))
    yield from _components(data.get("pre_tokenizer"))


def _scheme(metaspace: dict[str, Any]) -> str:
    default = "always" if metaspace.get("add_prefix_space", True) else "never"
    return str(metaspace.get("prepend_scheme") or default)


def _space(decoder: dict[str, Any]) -> str:
    """The text that a decoder replaces with a space; "" if there is none."""
    if decoder["type"] == "Replace" and decoder.get("content") == " ":
        pattern = decoder["pattern"]
        return str(pattern.get("String", "")) if isinstance(pattern, dict) else str(pattern)
    return str(decoder["replacement"]) if decoder["type"] == "Metaspace" else ""


def _prefix(data: dict[str, Any]) -> Prefix:
    parts = list(_parts(data))
    schemes = {_scheme(part) for part in parts if part["type"] == "Metaspace"}
    byte_level = any(p["type"] == "ByteLevel" and p.get("add_prefix_space", True) for p in parts)
    if byte_level or "always" in schemes or any(part["type"] == "Prepend" for part in parts):
        return "every"
    return "first" if "first" in schemes else "never"


def _without_prepend(normalizer: Any) -> Any:
    if normalizer is None or normalizer["type"] == "Prepend":
        return None
    if normalizer["type"] == "Sequence":
        kept = [_without_prepend(inner) for inner in normalizer["normalizers"]]
        return {**normalizer, "normalizers": [inner for inner in kept if inner is not None]}
    return normalizer
