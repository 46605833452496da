"""Answers of 4 to 64 tokens: a list of names, and a passage to copy.

In a short answer, few steps evict, so a step policy hardly loses what the rest of the answer needs.
In these it may. The bundled model was trained on values of a few tokens and ends these answers
after the first name, so they show nothing about it. It can answer `interview`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from minikv.cli.evaluation import metrics, telling
from minikv.cli.evaluation.files import Item
from minikv.cli.evaluation.tasks import TRAINED, Manner
from minikv.models.bundled import world
from minikv.models.bundled.exam import Codec

TOKENS = (4, 8, 16, 32, 64)
"""The lengths of answers, used in turn. An answer is at most a name or a sentence longer."""
LEAST = 800
"""Tokens of the shortest document with room for all long facts."""

_WHOLE = " Answer with all of it, word for word."
_LISTS = tuple(
    (kind, world.Attribute(noun, "What", str))
    for kind, noun in (
        ("town", "roll of honour"),
        ("ship", "crew list"),
        ("firm", "list of partners"),
        ("project", "guest list"),
    )
)
_PASSAGES = tuple(
    (kind, world.Attribute(noun, "What", str))
    for kind, noun in (
        ("person", "diary"),
        ("town", "chronicle"),
        ("ship", "log"),
        ("project", "report"),
    )
)
_BESIDE = 2  # other long facts of the same kind in a document


def names_listed(codec: Codec, names: world.Names, tokens: int) -> str:
    """A list of names of people, of at least `tokens` tokens."""
    listed = names.person()
    while len(codec.encode(listed)) < tokens:
        listed += f", {names.person()}"
    return listed


def sentences(codec: Codec, names: world.Names, tokens: int) -> str:
    """Sentences without facts, of at least `tokens` tokens, without the last full stop."""
    text = world.filler(names.rng)
    while len(codec.encode(text)) < tokens:
        text += f" {world.filler(names.rng)}"
    return text.rstrip(".")


def long_fact(
    codec: Codec,
    names: world.Names,
    kinds: Sequence[tuple[str, world.Attribute]],
    value: Callable[[Codec, world.Names, int], str],
    tokens: int,
) -> world.Fact:
    """A fact whose value has about `tokens` tokens, stated once in the document."""
    kind, attribute = names.rng.choice(kinds)
    make, _ = world.WORLD[kind]
    fact = world.stated(names.rng, make(names), attribute, value(codec, names, tokens))
    return replace(fact, statements=fact.statements[:1])


def listed(codec: Codec, names: world.Names, tokens: int) -> world.Fact:
    """A fact whose value is a list of names."""
    return long_fact(codec, names, _LISTS, names_listed, tokens)


def copied(codec: Codec, names: world.Names, tokens: int) -> world.Fact:
    """A fact whose value is a passage of plain sentences."""
    return long_fact(codec, names, _PASSAGES, sentences, tokens)


def lists(
    codec: Codec, tokens: int, count: int, seed: int, how: Manner = TRAINED
) -> Iterator[Item]:
    """`count` documents with one question each, for a list of names. The bundled model's answer
    must be exact; another model's score is the share of the names that its answer has."""
    for i in range(count):
        doc, rng = _told(codec, tokens, seed + i, listed, TOKENS[i % len(TOKENS)])
        fact = doc.chosen[0]
        names = (fact.answer,) if how is TRAINED else tuple(fact.answer.split(", "))
        metric = metrics.exact if how is TRAINED else metrics.values_found
        yield _item(doc.text, fact, names, rng, how, metric)


def passage(
    codec: Codec, tokens: int, count: int, seed: int, how: Manner = TRAINED
) -> Iterator[Item]:
    """`count` documents with one question each, for a passage to copy word for word."""
    for i in range(count):
        doc, rng = _told(codec, tokens, seed + i, copied, TOKENS[i % len(TOKENS)])
        fact = doc.chosen[0]
        yield _item(doc.text, fact, (fact.answer,), rng, how, how.metric)


def _told(
    codec: Codec,
    tokens: int,
    seed: int,
    make: Callable[[Codec, world.Names, int], world.Fact],
    length: int,
) -> tuple[telling.Told, random.Random]:
    def choose(names: world.Names) -> Sequence[world.Fact]:
        others = [names.rng.choice(TOKENS) for _ in range(_BESIDE)]
        return [make(codec, names, n) for n in (length, *others)]

    return telling.fresh(codec, tokens, seed, choose), random.Random(seed)


def _item(
    text: str,
    fact: world.Fact,
    right: tuple[str, ...],
    rng: random.Random,
    how: Manner,
    metric: metrics.Metric,
) -> Item:
    return Item(
        text,
        (rng.choice(fact.questions) + (_WHOLE if how.adds else ""),),
        (right,),
        metric,
        max_tokens=2 * TOKENS[-1],
    )
