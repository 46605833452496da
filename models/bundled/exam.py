"""Makes documents of a given length, with facts to ask about."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from minikv.models.bundled import world

FACT_EVERY = 200
"""Tokens of text per stated fact."""


class Codec(Protocol):
    """What `fresh` needs from a tokenizer."""

    def encode(self, text: str) -> list[int]: ...


def fresh(tokenizer: Codec, tokens: int, seed: int, long: Sequence[str] = ()) -> world.Document:
    """A document of `tokens` tokens (at most 16 more or fewer), with a fact of each of the kinds
    `long` of `world.LONG`. The same seed gives the same document."""
    sentences = max(1, tokens // 12)
    while True:
        facts = min(sentences, max(0, tokens // FACT_EVERY - len(long)), 110)
        doc = world.document(random.Random(seed), sentences, facts, long)
        size = len(tokenizer.encode(doc.text))
        if abs(size - tokens) <= 16:
            return doc
        # A sentence has 12 or 13 tokens; with a small vocabulary many more than with the bundled.
        each = 13 if size < 20 * sentences else size / sentences
        more = round((tokens - size) / each) or (1 if size < tokens else -1)
        sentences = max(1, sentences + more)
        seed += 1 << 40
