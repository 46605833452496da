"""A lower bound for the number of tokens in a text, so that a text that is too long can be refused
without tokenizing it.

No token stands for more bytes than the longest one of the vocabulary, so a text has at least `bytes
/ longest` tokens. This is true only if tokenizing loses nothing. A tokenizer that drops characters,
or puts several unknown ones in one token, is detected by a test string and gets no bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

# Characters that hardly any vocabulary has, and white space that a lossy normalizer would shorten.
_RARE = "".join(chr(0xF0000 + i) for i in range(40))
_PROBE = f"a{_RARE}b  \t\n\n  c{' ' * 40}Ａﬁé e\u0301"


class Codec(Protocol):
    """The part of a tokenizer that the bound needs."""

    @property
    def vocab(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Iterable[int]) -> str: ...


def longest_token(tokenizer: Codec) -> int | None:
    """An upper bound of the UTF-8 bytes that one token stands for; None if there is none."""
    if tokenizer.decode(tokenizer.encode(_PROBE)) != _PROBE:
        return None
    # A part of a character decodes to U+FFFD, three bytes, which is never shorter than the part.
    # One more: a leading space may be dropped from a text that begins with this token.
    return 1 + max(len(tokenizer.decode([id]).encode()) for id in range(tokenizer.vocab))


class MinTokens:
    """The bound for one tokenizer. The first call of `of` looks through the vocabulary."""

    def __init__(self, tokenizer: Codec) -> None:
        self._tokenizer = tokenizer
        self._longest: float | None = None

    def of(self, size: int) -> int:
        """The least number of tokens in a text of `size` bytes."""
        if self._longest is None:
            self._longest = longest_token(self._tokenizer) or math.inf
        return int(size / self._longest)
