"""Examines the bundled model: asks about new documents, and compares whole answers exactly."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Protocol

from minikv.models.bundled import world

FACT_EVERY = 200
"""Tokens of text per stated fact."""


class Codec(Protocol):
    """What `fresh` needs of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...


class Chat(Protocol):
    """What `exact` needs of a `minikv.chat.session.ChatSession`."""

    @property
    def tokenizer(self) -> Codec: ...
    def reset(self) -> None: ...
    def attach(self, text: str, name: str | None = None) -> None: ...
    def ask(self, question: str, max_tokens: int = 16) -> Iterator[str]: ...


def fresh(tokenizer: Codec, tokens: int, seed: int) -> world.Document:
    """A document of `tokens` tokens, at most 16 more or fewer. The same seed gives the same
    document."""
    sentences = max(1, tokens // 12)
    while True:
        facts = min(sentences, tokens // FACT_EVERY, 110)
        doc = world.document(random.Random(seed), sentences, facts)
        size = len(tokenizer.encode(doc.text))
        if abs(size - tokens) <= 16:
            return doc
        sentences = nearer(sentences, size, tokens)
        seed += 1 << 40


def nearer(sentences: int, size: int, tokens: int) -> int:
    """How many sentences to try next, after `sentences` sentences had `size` tokens instead of
    `tokens`.

    With the bundled tokenizer a sentence has 12 or 13 tokens; with a small vocabulary many more.
    """
    each = 13 if size < 20 * sentences else size / sentences
    return max(1, sentences + (round((tokens - size) / each) or (1 if size < tokens else -1)))


def exact(
    chat: Chat, tokens: int, chats: int, asked: int, seed: int, *, least: int = 1
) -> list[list[bool]]:
    """[chats][asked]: whether each answer was exactly right.

    Chat i asks `asked` questions, one after the other, about one document of `tokens` tokens.
    least: ask only for answers of at least so many tokens. With 2, every answer has a token that
    depends on the policy: the first token comes from the prompt's own logits, before anything is
    evicted.
    """
    table = []
    for i in range(chats):
        chat.reset()
        doc = fresh(chat.tokenizer, tokens, seed + i)
        chat.attach(doc.text, name="report.txt")
        facts = (f for f in doc.facts if len(chat.tokenizer.encode(f.answer)) >= least)
        doc = world.Document(doc.text, tuple(facts))
        row = []
        for question, answer in world.questions(random.Random(seed + i), doc, asked):
            row.append("".join(chat.ask(question, max_tokens=16)).strip() == answer)
        table.append(row)
    return table


def share(table: list[list[bool]]) -> float:
    """The share of answers that were right, from 0 to 1."""
    flat = [ok for row in table for ok in row]
    return sum(flat) / len(flat)
