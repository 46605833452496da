"""Answers of 4 to 64 tokens: a list of names, and a passage to copy.

While a short answer is written, hardly anything leaves memory: a policy that evicts at every step
has no occasion to lose what the rest of the answer needs. Here it has. The bundled model was
trained on values of a few tokens and ends these answers after the first name, so of it they show
nothing; `interview` is within its reach.
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
"""An answer has at least so many, and at most a name or a sentence more; each length in turn."""
LEAST = 800
"""Tokens of the shortest document that has room for every long fact."""

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
    """Names of people, of at least so many tokens."""
    listed = names.person()
    while len(codec.encode(listed)) < tokens:
        listed += f", {names.person()}"
    return listed


def sentences(codec: Codec, names: world.Names, tokens: int) -> str:
    """Plain sentences about nothing, of at least so many tokens, without the last full stop."""
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
    """A fact whose value has about so many tokens, told once."""
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
    """`count` documents, one question each: for a list of names. Told how to answer, a model is
    scored by the share of the names in its answer."""
    for i in range(count):
        told, rng = _told(codec, tokens, seed + i, listed, TOKENS[i % len(TOKENS)])
        fact = told.chosen[0]
        names = (fact.answer,) if how is TRAINED else tuple(fact.answer.split(", "))
        metric = metrics.exact if how is TRAINED else metrics.values_found
        yield _item(told.text, fact, names, rng, how, metric)


def passage(
    codec: Codec, tokens: int, count: int, seed: int, how: Manner = TRAINED
) -> Iterator[Item]:
    """`count` documents, one question each: for a passage to copy, word for word."""
    for i in range(count):
        told, rng = _told(codec, tokens, seed + i, copied, TOKENS[i % len(TOKENS)])
        fact = told.chosen[0]
        yield _item(told.text, fact, (fact.answer,), rng, how, how.metric)


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
