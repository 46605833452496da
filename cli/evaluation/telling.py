"""Documents of the bundled model's world that contain chosen facts among others.

A task that asks for more than single facts says which facts its document must contain. The rest of
the document is as in the other tasks: as many facts per token, in the same wordings.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minikv.errors import UsageError
from minikv.models.bundled import exam, world
from minikv.models.bundled.exam import Codec

LEAST = 500
"""Tokens of the shortest document that has room for every chosen fact of every task."""

_OTHERS = 3  # facts beside the chosen ones, at the least


@dataclass(frozen=True, slots=True)
class Told:
    """A document's text, the chosen facts in the order in which they were given, and the others."""

    text: str
    chosen: tuple[world.Fact, ...]
    others: tuple[world.Fact, ...]


def tell(
    names: world.Names,
    kind: str,
    noun: str,
    entity: str | None = None,
    value: str | None = None,
) -> world.Fact:
    """The fact that `value` is the `noun` of `entity`, which is of a kind in `world.WORLD`. An
    entity or value that is not given is drawn at random."""
    make, attributes = world.WORLD[kind]
    attribute = next(a for a in attributes if a.noun == noun)
    entity = make(names) if entity is None else entity
    value = attribute.draw(names) if value is None else value
    return world.stated(names.rng, entity, attribute, value)


def fresh(
    codec: Codec, tokens: int, seed: int, choose: Callable[[world.Names], Sequence[world.Fact]]
) -> Told:
    """A document of `tokens` tokens, within 16, with the facts that `choose` makes; the same for
    the same seed. Raises UsageError if the facts do not fit into so few tokens."""
    sentences = tokens // 12
    while True:
        rng = random.Random(seed)
        names = world.Names(rng)
        chosen = choose(names)
        usual = min(sentences, tokens // exam.FACT_EVERY, 110)
        others, entities = world.some_facts(rng, names, max(_OTHERS, usual - len(chosen)))
        told = len(chosen) + len(others)
        if told > sentences:  # of a small vocabulary: a sentence has many tokens
            raise UsageError(
                f"a document of {tokens:,} tokens has about {sentences} sentences with this "
                f"tokenizer, too few to tell {told} facts",
                "give a larger --length, or another task",
            )
        doc = world.written(rng, sentences, [*chosen, *others], entities)
        size = len(codec.encode(doc.text))
        if abs(size - tokens) <= 16:
            return Told(doc.text, tuple(chosen), tuple(others))
        sentences = exam.nearer(sentences, size, tokens)
        seed += 1 << 40
