"""Questions that are made here: facts, follow-ups and needles, from the bundled model's world.

The world is known to the bundled model; to any other model its documents are plain English, and
its questions ask for what a document says, word for word.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from minikv.cli.evaluation.files import Item
from minikv.models.bundled import exam, world
from minikv.models.bundled.exam import Codec

FOLLOWUPS = 6
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
LEAST = exam.FACT_EVERY
"""Tokens of the shortest document with a fact to ask for. A needle's may be shorter."""


def facts(codec: Codec, tokens: int, count: int, seed: int) -> Iterator[Item]:
    """`count` documents of `tokens` tokens with many facts, one question each, which comes with its
    document. Only answers of two tokens and more: the first one is decided before any eviction."""
    for i in range(count):
        doc = exam.fresh(codec, tokens, seed + i)
        chosen = [f for f in doc.facts if len(codec.encode(f.answer)) > 1] or list(doc.facts)
        yield _ask(doc.text, chosen, 1, seed + i)


def followup(codec: Codec, tokens: int, count: int, seed: int) -> Iterator[Item]:
    """`count` documents, each with six questions in one chat."""
    for i in range(count):
        doc = exam.fresh(codec, tokens, seed + i)
        yield _ask(doc.text, doc.facts, FOLLOWUPS, seed + i)


def _ask(text: str, chosen: Sequence[world.Fact], asked: int, seed: int) -> Item:
    rng = random.Random(seed)
    few = rng.sample(list(chosen), min(asked, len(chosen)))
    return Item(
        text, tuple(rng.choice(f.questions) for f in few), tuple((f.answer,) for f in few),
        max_tokens=16,
    )  # fmt: skip


def needle(
    codec: Codec, lengths: Sequence[int], count: int, seed: int, depths: Sequence[float] = DEPTHS
) -> Iterator[Item]:
    """One fact told once at a depth of a text without others, `count` for each depth and length."""
    for length in lengths:
        for depth in depths:
            for i in range(count):
                # A text, of which no two are the same, where a sum could be.
                yield _needle(codec, length, depth, random.Random(f"{seed} {length} {depth} {i}"))


def _needle(codec: Codec, length: int, depth: float, rng: random.Random) -> Item:
    told = world.document(rng, 1, 1)
    fact = told.facts[0]
    hay: list[str] = []
    size = len(codec.encode(told.text))
    while size < length - 8:
        sentence = world.document(rng, 1, 0).text
        hay.append(sentence)
        size += len(codec.encode(" " + sentence))
    hay.insert(round(depth * len(hay)), told.text)
    text = "\n\n".join(" ".join(hay[i : i + 5]) for i in range(0, len(hay), 5))
    return Item(
        text, (rng.choice(fact.questions),), ((fact.answer,),), max_tokens=16,
        where=(depth, length),
    )  # fmt: skip
