"""Streaming text: the bytes of each token, joined by an incremental UTF-8 decoder.

O(1) per token, nothing is decoded twice, and any sequence of ids has a defined text: ids without
bytes (control tokens, rows of the output head beyond the vocabulary) add nothing, malformed UTF-8
becomes U+FFFD exactly as in `bytes.decode("utf-8", "replace")`.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from functools import cache

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@cache
def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of the byte-level BPE alphabet.

    Printable Latin-1 stands for itself, every other byte for the next character from U+0100 on
    (Radford et al., 2019: `bytes_to_unicode` of the GPT-2 release).
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(plain)]
    table = {chr(byte): byte for byte in plain}
    table.update((chr(0x100 + n), byte) for n, byte in enumerate(hidden))
    return table


def byte_level_bytes(piece: str) -> bytes:
    """The bytes that a piece of a byte-level BPE vocabulary spells."""
    alphabet = byte_level_alphabet()
    try:
        return bytes([alphabet[char] for char in piece])
    except KeyError:  # an added word written in plain text
        return piece.encode("utf-8", "replace")


def word_piece_bytes(piece: str, byte_fallback: bool = True, space: str = "▁") -> bytes:
    """The bytes that a sentencepiece-style piece spells: `▁` is a space, `<0x0A>` one byte."""
    if byte_fallback and (byte := _BYTE_PIECE.fullmatch(piece)):
        return bytes([int(byte[1], 16)])
    return piece.replace(space, " ").encode("utf-8", "replace")


class TextStream:
    """Ids in, text out, as early as it is certain.

    `pieces[id]` are the bytes of a token, empty for those that have no text. With `drop_space`
    one space at the very beginning is dropped: sentencepiece writes the first word with it.
    """

    def __init__(self, pieces: Sequence[bytes], drop_space: bool = False) -> None:
        self._pieces = pieces
        self._at_start = drop_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The text that became certain with this token; "" while a character is incomplete."""
        if not 0 <= id < len(self._pieces):
            return ""
        return self._emit(self._decoder.decode(self._pieces[id]))

    def flush(self) -> str:
        """What an unfinished character leaves: U+FFFD or nothing. Ends the text."""
        return self._emit(self._decoder.decode(b"", final=True))

    def _emit(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text
