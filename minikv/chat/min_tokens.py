"""How few tokens a text can take: enough to refuse ten megabytes without tokenizing them.

No token stands for more bytes than the longest entry of the vocabulary, so `bytes / longest` is a
lower bound, as long as tokenizing loses nothing. Vocabularies that do (that drop characters, or
put a run of unknown ones into one token) are found by trying, and get no bound.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

# Characters that hardly any vocabulary has, and white space that a lossy normalizer would shrink.
_RARE = "".join(chr(0xF0000 + i) for i in range(40))
_PROBE = f"a{_RARE}b  \t\n\n  c{' ' * 40}Ａﬁé e\u0301"


class Codec(Protocol):
    """What the bound needs of a tokenizer."""

    @property
    def vocab(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Iterable[int]) -> str: ...


def longest_token(tokenizer: Codec) -> int | None:
    """Upper bound on the UTF-8 bytes of text behind one id, or None where there is none."""
    if tokenizer.decode(tokenizer.encode(_PROBE)) != _PROBE:
        return None
    # A part of a character decodes to U+FFFD, three bytes, which is never shorter than the part.
    # One more: a leading space may be dropped from a text that begins with this token.
    return 1 + max(len(tokenizer.decode([id]).encode()) for id in range(tokenizer.vocab))
