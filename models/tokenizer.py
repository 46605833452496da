"""Turns text into ids and back. No text can produce a control token.

`encode` never returns a control id, whatever the text spells. Control ids come only from `split`,
which is for text that minikv or a chat template wrote. Lone surrogates, into which Python turns
typed bytes that it cannot decode, are replaced with U+FFFD.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from minikv.models.errors import CorruptModel, ModelUnavailable, UnsupportedModel, quote
from minikv.models.files import read_json
from minikv.models.stream import TextStream
from minikv.models.tokenizer_json import JsonVocabulary
from minikv.models.tokenizer_sp import PieceVocabulary
from minikv.models.tokenizer_tekken import read_tekken
from minikv.models.vocabulary import (
    LARGEST_ID,
    Place,
    Prefix,
    TokenSearch,
    Vocabulary,
    check_added,
    is_marker,
    lost,
    text_of,
)

_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>")
_CLOSING = re.compile(rb"[\"')\]*_]+\s*")
_STOP = re.compile(rb"[.!?][\"')\]*_]*\s*$")
_LINE, _PARAGRAPH = re.compile(rb"\r?\n"), re.compile(rb"\n\r?\n")
_WIDE_STOPS = tuple(stop.encode() for stop in "。！？")
_ENDS_ALWAYS, _STOPS, _CLOSES, _SPACE_BEFORE, _SPACE_AFTER, _LINE_BEFORE, _LINE_AFTER = (
    1 << bit for bit in range(7)
)
_NAMED = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_USUAL = {"bos_token": ("<s>", "<|begin_of_text|>", "<|bos|>"), "eos_token": ("</s>",)}


class Tokenizer:
    """One model's vocabulary, and the settings for it in the model's folder.

    vocab: the number of ids. control: control tokens, string to id. search: finds control tokens in
    a text. stop_ids: ids that end an answer, from all sources. bos: the id of the BOS token, or
    None. named: the special strings that a chat template may use (`bos_token`, `eos_token`, ...).
    prefix: see `vocabulary.Prefix`. start: the string with which a text without chat format begins:
    BOS or "". version: that of a Mistral tokenizer ("v3"), if its file states it. notes: messages
    for the user.

    extra and words: control tokens and other added tokens that the vocabulary lacks. Words have
    text, but no text is encoded to their ids.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        named: Mapping[str, str] | None = None,
        extra: Mapping[str, int] | None = None,
        words: Mapping[str, int] | None = None,
        special: Iterable[str] = (),
        stop_ids: Iterable[int] = (),
        starts_with_bos: bool = True,
        version: str = "",
    ) -> None:
        self._vocabulary = vocabulary
        control = {**(extra or {}), **vocabulary.control}
        check_added(control, "the tokenizer")
        self.control: Mapping[str, int] = control
        also = {**(words or {}), **(extra or {})}
        self.vocab = max([vocabulary.size, *(id + 1 for id in (control | also).values())])
        self.prefix: Prefix = vocabulary.prefix
        self.named: Mapping[str, str] = dict(named or {})
        self.bos = self._id(self.named.get("bos_token"))
        self.start = self.named.get("bos_token", "") if starts_with_bos else ""
        ends = [self._id(self.named.get("eos_token")), *(control.get(end) for end in _ENDS)]
        self.stop_ids = frozenset(stop_ids) | {id for id in ends if id is not None}
        self._edges = vocabulary.edges
        self._forbidden = frozenset(control.values()) - {vocabulary.unknown}
        self.search = TokenSearch(control)
        self._pieces = [*vocabulary.pieces, *([b""] * (self.vocab - vocabulary.size))]
        for text, id in also.items():
            self._pieces[id] = text.encode("utf-8", "replace")
        for text in control.keys() & special:
            self._pieces[control[text]] = b""
        self._sentence_marks: dict[int, int] = {}
        self._loses = lost(vocabulary)
        self.version = version
        self.notes = vocabulary.notes
        if self._loses:
            what = ", ".join(self._loses)
            self.notes += (f"the tokenizer drops or changes these characters of a text: {what}",)

    @classmethod
    def from_folder(
        cls, path: Path | str, stop_ids: Iterable[int] = (), family: str = "", rows: int = 0
    ) -> Tokenizer:
        """Read `tokenizer.json`, or without it `tokenizer.model` or `tekken.json`. stop_ids: those
        of the model's configuration. family and rows: its model_type, and the rows of its
        embedding.

        Raises ModelUnavailable (no tokenizer), UnsupportedModel (tiktoken format, or a reading that
        does not fit the vocabulary) and CorruptModel (a damaged file, named).
        """
        folder = Path(path)
        config, others = (
            read_json(file) if (file := folder / name).exists() else {}
            for name in ("tokenizer_config.json", "special_tokens_map.json")
        )
        named = {
            key: text
            for key in _NAMED
            if (text := _content(config.get(key, others.get(key)))) is not None
        }
        stated = "bos_token" in config or "bos_token" in others
        declared, special = _declared(folder, config)
        special.update(named.values())
        for source in (config, others):
            listed = source.get("additional_special_tokens")
            special.update(filter(None, map(_content, listed if isinstance(listed, list) else ())))
        extra = {text for text in declared if text in special or is_marker(text)}
        # Those in the vocabulary become added tokens too.
        check_added(special | extra, "the tokenizer")
        version = ""
        vocabulary: Vocabulary
        if (file := folder / "tokenizer.json").exists():
            names = special | extra
            vocabulary = JsonVocabulary(read_json(file), file.name, names, family, rows)
        elif (model := _sentencepiece_file(folder)) is not None:
            file = model
            # "legacy": false means in transformers that a text after a control token gets no space.
            prefix: Prefix = "first" if config.get("legacy") is False else "every"
            vocabulary = pieces = PieceVocabulary.from_file(model, prefix)
            version = model.suffix[1:].partition("m")[0]  # v7m1 is v7, with images
            if not stated:
                own = {"bos_token": pieces.bos, "eos_token": pieces.eos}
                named = {**{key: text for key, text in own.items() if text}, **named}
        elif (file := folder / "tekken.json").exists():
            vocabulary, version = read_tekken(file)
        else:
            raise ModelUnavailable(f"no tokenizer.json, tokenizer.model or tekken.json in {folder}")
        new = {}
        for text, one in declared.items():
            if (known := vocabulary.find(text)) is None:
                new[text] = one[0]
            elif known != one[0]:
                raise _disagree(text, (known, file.name), one)
        ordinary = set(new.values()) - set(vocabulary.control.values())
        for text, id in new.items():
            piece = vocabulary.pieces[id] if id in ordinary and id < vocabulary.size else b""
            if piece not in (b"", text.replace("\u2581", " ").encode("utf-8", "replace")):
                raise CorruptModel(
                    f"the added token {quote(text, 40)} has the id {id:,}, which is that of "
                    f"{quote(piece.decode('utf-8', 'replace'), 40)}"
                )
        if not stated:
            for key, usual in _USUAL.items():
                text = next((u for u in usual if u in vocabulary.control or u in new), None)
                if key not in named and text is not None:
                    named[key] = text
        return cls(
            vocabulary,
            named=named,
            extra={text: id for text, id in new.items() if text in extra},
            words={text: id for text, id in new.items() if text not in extra},
            special={*named.values(), *special},
            stop_ids=stop_ids,
            starts_with_bos=config.get("add_bos_token") is not False,
            version=version,
        )

    @property
    def largest(self) -> int:
        """The largest id that `encode` can return."""
        pieces = self._vocabulary.pieces
        ids = (id for id in range(len(pieces) - 1, -1, -1) if id not in self._forbidden)
        return next((id for id in ids if pieces[id]), 0)

    def encode(self, text: str, place: Place = "start") -> list[int]:
        """The ids of plain text. No BOS is added, and no control id is ever returned.

        place: where the text is: at the "start", "after" a control token, or "inside" a text. This
        decides whether a sentencepiece-style vocabulary puts a space in front. Raises
        UnsupportedModel if the vocabulary cannot encode the text without control tokens.
        """
        text = well_formed(text)
        if not text:
            return []
        ids = self._vocabulary.encode(text, place)
        if self._forbidden.isdisjoint(ids):
            return ids
        # A vocabulary that looks up whole words also finds control strings. Divide each of these
        # strings in two, and encode the parts separately.
        ids, at = [], 0
        cuts = [start + 1 for start, _ in self.search.find(text)]
        for cut in [*cuts, len(text)]:
            ids += self._vocabulary.encode(text[at:cut], place if at == 0 else "inside")
            at = cut
        if not self._forbidden.isdisjoint(ids):
            raise UnsupportedModel("this vocabulary makes control tokens out of plain text")
        return ids

    def joined(self, segments: Iterable[tuple[int | None, str]], place: Place) -> list[int]:
        """The ids of the result of `split`, perhaps with other texts. place: of the first text."""
        ids: list[int] = []
        for id, text in segments:
            if id is not None:
                ids.append(id)
                place = "after"
            ids += self.encode(text, place)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. Control tokens that a file calls special and ids outside the vocabulary
        have none."""
        return text_of(ids, self._pieces, self._vocabulary.drop_space)

    def stream(self) -> TextStream:
        """A decoder for ids that arrive one by one. The pieces joined are `decode` of all ids."""
        return TextStream(self._pieces, self._vocabulary.drop_space)

    def sentence_ends(self, ids: Sequence[int]) -> list[bool]:
        """For each token, whether a sentence ends with it: with `.`, `!` or `?` before white space
        (quotes or brackets may come between), with a Chinese or Japanese full stop, with a
        paragraph (not a single line end), or with a token without text."""
        known, size = self._sentence_marks, len(self._pieces)
        for id in {*ids}.difference(known):
            known[id] = _marks(self._pieces[id] if 0 <= id < size else b"")
        found, stopped = list[bool](), False
        for mark, after in pairwise((*map(known.__getitem__, ids), 0)):
            stopped = bool(mark & _STOPS) or (stopped and bool(mark & _CLOSES))
            spaced = mark & _SPACE_AFTER or after & _SPACE_BEFORE
            line = mark & _LINE_AFTER and after & _LINE_BEFORE
            found.append(bool(mark & _ENDS_ALWAYS or line or (stopped and spaced)))
            stopped = stopped and not found[-1]
        return found

    def lost(self, text: str) -> int:
        """How many characters of a text the ids lose: the vocabulary cannot spell them, or the
        tokenizer replaces them with others."""
        if not self._loses:
            return 0
        text = well_formed(text)
        return (Counter(text) - Counter(self.decode(self.encode(text)))).total()

    def lookalikes(self, text: str) -> int:
        """How often a text spells a control token."""
        return sum(1 for _ in self.search.find(text))

    def split(self, text: str) -> list[tuple[int | None, str]]:
        """Split trusted text into [(control id, the plain text after it), ...].

        The first pair has None instead of an id, and the text before any control token. Control
        strings are found from the left, the longest first. They absorb white space around them
        according to their file, as in the tokenizers library.
        """
        found: list[tuple[int | None, str]] = []
        id: int | None = None
        at = 0
        for start, token in self.search.find(text):
            left, right, whole = self._edges.get(token, (False, False, False))
            end = start + len(token)
            if start < at or (whole and _joins_word(text, start, end)):
                continue
            preceding = text[at:start]
            found.append((id, preceding.rstrip() if left else preceding))
            id = self.control[token]
            at = end
            while right and at < len(text) and text[at].isspace():
                at += 1
        found.append((id, text[at:]))
        return found

    def _id(self, text: str | None) -> int | None:
        if text is None:
            return None
        return self.control[text] if text in self.control else self._vocabulary.find(text)


def well_formed(text: str) -> str:
    """The text with surrogate pairs joined and lone surrogates replaced by U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _marks(piece: bytes) -> int:
    """The marks above that apply to a token."""
    if not piece or piece.endswith(_WIDE_STOPS) or _PARAGRAPH.search(piece):
        return _ENDS_ALWAYS | _SPACE_BEFORE * piece[:1].isspace()
    marks = (
        (_STOPS, _STOP.search(piece)),
        (_CLOSES, _CLOSING.fullmatch(piece)),
        (_SPACE_BEFORE, piece[:1].isspace()),
        (_SPACE_AFTER, piece[-1:].isspace()),
        (_LINE_BEFORE, _LINE.match(piece)),
        (_LINE_AFTER, piece[-1:] == b"\n"),
    )
    return sum(mark for mark, found in marks if found)


def _joins_word(text: str, start: int, end: int) -> bool:
    return any(c.isalnum() or c == "_" for c in (text[start - 1 : start], text[end : end + 1]))


def _content(entry: Any) -> str | None:
    """The string of a special token in a configuration file: a string, or an object's "content";
    None for anything else."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) and text else None


_Declared = tuple[int, str]
"""The id of an added token, and the file that states it."""


def _declared(folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, _Declared], set[str]]:
    """The tokens that `added_tokens.json` or `tokenizer_config.json` add to a vocabulary, and those
    that they call special. Raises CorruptModel for an impossible id, and for two different ids."""
    file, decoder = folder / "added_tokens.json", config.get("added_tokens_decoder")
    listed = [*(read_json(file) if file.exists() else {}).items()]
    entries = decoder if isinstance(decoder, dict) else {}
    found: dict[str, _Declared] = {}
    for name, pairs in (
        (file.name, listed),
        ("tokenizer_config.json", [(_content(entry), id) for id, entry in entries.items()]),
    ):
        for text, id in pairs:
            if text:
                one = _number(text, id), name
                if found.setdefault(text, one)[0] != one[0]:
                    raise _disagree(text, found[text], one)
    objects = (entry for entry in entries.values() if isinstance(entry, dict))
    special = {_content(entry) for entry in objects if entry.get("special") is True}
    return found, {text for text in special if text}


def _number(text: str, id: Any) -> int:
    number = int(id) if re.fullmatch(r"\d{1,9}", str(id), re.ASCII) else LARGEST_ID
    if number >= LARGEST_ID:
        raise CorruptModel(f"the added token {text[:40]!r} has the id {str(id)[:40]!r}")
    return number


def _disagree(text: str, *said: _Declared) -> CorruptModel:
    ids = ", and ".join(f"{id:,} in {file}" for id, file in said)
    return CorruptModel(f"the added token {quote(text, 40)} has the id {ids}")


def _sentencepiece_file(folder: Path) -> Path | None:
    """`tokenizer.model`, or Mistral's `tokenizer.model.v3`."""
    plain = folder / "tokenizer.model"
    if plain.exists():
        return plain
    return max(folder.glob("tokenizer.model.v*"), default=None)
