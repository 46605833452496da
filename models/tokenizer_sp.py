"""Reads `tokenizer.model` with sentencepiece, so that no text can produce a control token.

A text never produces control pieces, but it can produce user-defined pieces. So those that look
like control tokens (`<|im_start|>`, but also the `[REFERENCE_DOC_n]` of Mistral v3) are changed to
control pieces in the bytes of the file, before sentencepiece parses it. A text that spells one then
becomes ordinary pieces. This is the only difference from the vendor's ids. If the model writes such
a piece, its text appears, as with the vendor.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import sentencepiece

from minikv.models.errors import CorruptModel, UnsupportedModel
from minikv.models.files import read_bytes
from minikv.models.stream import word_piece_bytes
from minikv.models.vocabulary import (
    LARGEST_ID,
    Edges,
    Place,
    Prefix,
    is_marker,
    library_errors,
)

_USER_DEFINED, _CONTROL = 4, 3
# Later fields win in a protobuf message: normalizer_spec (3) { add_dummy_prefix (3): false }.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


class PieceVocabulary:
    """The content of a sentencepiece file. prefix: "every" is the vendor's behaviour, "first" that
    of `legacy: false` in transformers."""

    def __init__(
        self, data: bytes, name: str = "tokenizer.model", prefix: Prefix = "every"
    ) -> None:
        self._name = name
        if _is_tiktoken(data):
            raise UnsupportedModel(
                f"{name} is in tiktoken format, not sentencepiece",
                "use the Hugging Face layout of this model, which has a tokenizer.json",
            )
        with library_errors(name, "not a sentencepiece model"):
            self._data, shown = _shield_markers(data)
            self._model = sentencepiece.SentencePieceProcessor(model_proto=self._data)
            model = self._model
            self.size = int(model.vocab_size())
        if not 0 < self.size <= LARGEST_ID:
            raise CorruptModel(f"{name} has {self.size} pieces")
        with library_errors(name, "unreadable pieces"):
            ids = range(self.size)
            names = [model.id_to_piece(id) for id in ids]
            control = [id for id in ids if model.is_control(id) or model.is_unknown(id)]
            self.control = {names[id]: id for id in control}
            silent = {*control, *filter(model.is_unused, ids)}.difference(shown)
            self.pieces = [
                b"" if id in silent else word_piece_bytes(names[id], bool(model.is_byte(id)))
                for id in ids
            ]
            self.edges: dict[str, Edges] = {}
            self.unknown: int | None = int(model.unk_id())
            self.notes: tuple[str, ...] = ()
            self.bos, self.eos = _piece(model, model.bos_id()), _piece(model, model.eos_id())
            adds_space = model.encode("a") != self._bare.encode("a")
        self.prefix: Prefix = prefix if adds_space else "never"
        self.drop_space = adds_space

    @classmethod
    def from_file(cls, path: Path, prefix: Prefix = "every") -> PieceVocabulary:
        """Read the file. Raises CorruptModel, UnsupportedModel (tiktoken) or ModelUnavailable."""
        return cls(read_bytes(path, 64 << 20), path.name, prefix)

    def encode(self, text: str, place: Place) -> list[int]:
        """The ids of a text. `place` and `prefix` decide whether a space is put in front. Raises
        CorruptModel."""
        starts = place == "start" or (place == "after" and self.prefix == "every")
        model = self._model if starts else self._bare
        with library_errors(self._name, "the text cannot be encoded"):
            ids: list[int] = model.encode(text)
        return ids

    def find(self, piece: str) -> int | None:
        """The id of a piece; None if the vocabulary has no such piece."""
        known = piece.encode("utf-8", "replace").decode()  # the library accepts no lone surrogates
        id = int(self._model.piece_to_id(known))
        return id if self._model.id_to_piece(id) == piece else None

    @cached_property
    def _bare(self) -> sentencepiece.SentencePieceProcessor:
        return sentencepiece.SentencePieceProcessor(model_proto=self._data + _NO_DUMMY_PREFIX)


def _piece(model: sentencepiece.SentencePieceProcessor, id: int) -> str | None:
    return str(model.id_to_piece(id)) if 0 <= id < model.vocab_size() else None


def _is_tiktoken(data: bytes) -> bool:
    """Whether the file has lines of base64 and a rank, like Llama-3's original
    `tokenizer.model`."""
    token, _, rank = data[:200].split(b"\n")[0].partition(b" ")
    return bool(token) and rank.strip().isdigit() and all(32 < byte < 127 for byte in token)


def _shield_markers(data: bytes) -> tuple[bytes, list[int]]:
    """The file's bytes with user-defined pieces that look like control tokens changed to control
    pieces, and the ids of these pieces."""
    patched = bytearray(data)
    changed = []
    id = -1
    for field, start, end in _fields(data, 0, len(data)):
        if field != 1:  # pieces
            continue
        id += 1
        piece, type_at = "", -1
        for inner, at, stop in _fields(data, start, end):
            if inner == 1:
                piece = data[at:stop].decode("utf-8", "replace")
            elif inner == 3:
                type_at = at
        if type_at >= 0 and data[type_at] == _USER_DEFINED and is_marker(piece):
            patched[type_at] = _CONTROL
            changed.append(id)
    return bytes(patched), changed


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(field number, first byte, byte after the last) of each value of a protobuf message. Raises
    ValueError."""
    while at < end:
        key, at = _varint(data, at, end)
        wire = key & 7
        if wire == 0:
            stop = _varint(data, at, end)[1]
        elif wire == 2:
            length, at = _varint(data, at, end)
            stop = at + length
        elif wire in (1, 5):
            stop = at + (8 if wire == 1 else 4)
        else:
            raise ValueError(f"wire type {wire}")
        if stop > end:
            raise ValueError("truncated")
        yield key >> 3, at, stop
        at = stop


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            raise ValueError("truncated")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise ValueError("number too long")
