"""Streams text: an incremental UTF-8 decoder joins the bytes of each token.

Each token takes constant time, and nothing is decoded twice. Any sequence of ids has a defined
text: ids without bytes (control tokens, rows of lm_head beyond the vocabulary) add nothing, and
malformed UTF-8 becomes U+FFFD exactly as in `bytes.decode("utf-8", "replace")`.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from functools import cache

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@cache
def byte_level_alphabet() -> dict[str, int]:
    """The byte-level BPE alphabet: the byte that each character means.

    Printable Latin-1 characters mean themselves. The other bytes are the characters from U+0100 on,
    in order (Radford et al., 2019: `bytes_to_unicode` of the GPT-2 release).
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(plain)]
    table = {chr(byte): byte for byte in plain}
    table.update((chr(0x100 + n), byte) for n, byte in enumerate(hidden))
    return table


@cache
def _latin() -> dict[int, int]:
    """For `str.translate`: byte-level letters become Latin-1, and all other characters do not."""
    letters = {ord(letter): byte for letter, byte in byte_level_alphabet().items()}
    return {**dict.fromkeys(range(0x100), 0xFFFF), **letters}


def byte_level_bytes(piece: str) -> bytes:
    """The bytes that a piece of a byte-level BPE vocabulary spells."""
    try:
        return piece.translate(_latin()).encode("latin-1")
    except UnicodeEncodeError:  # an added word, which is plain text
        return piece.encode("utf-8", "replace")


def word_piece_bytes(piece: str, byte_fallback: bool = True, space: str = "▁") -> bytes:
    """The bytes that a sentencepiece-style piece spells: `▁` is a space, `<0x0A>` one byte."""
    if byte_fallback and (byte := _BYTE_PIECE.fullmatch(piece)):
        return bytes([int(byte[1], 16)])
    return piece.replace(space, " ").encode("utf-8", "replace")


class TextStream:
    """Takes token ids and returns their text as soon as it is certain.

    pieces[id]: the bytes of a token, empty if it has no text. drop_space: drop one space at the
    very beginning, which sentencepiece puts before the first word.
    """

    def __init__(self, pieces: Sequence[bytes], drop_space: bool = False) -> None:
        self._pieces = pieces
        self._at_start = drop_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """Add a token. Returns the text that is now certain; "" while a character is incomplete."""
        if not 0 <= id < len(self._pieces):
            return ""
        return self._emit(self._decoder.decode(self._pieces[id]))

    def flush(self) -> str:
        """End the text. Returns U+FFFD if a character is incomplete, else ""."""
        return self._emit(self._decoder.decode(b"", final=True))

    def _emit(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text
