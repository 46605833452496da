"""Long numbers: a value of 32 and one of 64 digits, in one piece and in pieces of four.

Long values are what eviction loses first (H2O falls from 100 to 35 % between 7 and 64 digits:
arXiv 2407.01527). The bundled model was trained on codes of four digits and ends an answer there,
so `digits` shows nothing of it but whether two caches answer alike. `codes` is within its reach: a
number of 64 digits, told as sixteen facts of four digits and asked for one after the other; it is
right if all are. The first eight are a number of 32.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from minikv.cli.evaluation import telling
from minikv.cli.evaluation.files import Item
from minikv.cli.evaluation.tasks import TRAINED, Manner
from minikv.models.bundled import world
from minikv.models.bundled.exam import Codec

CODES = 16
_FOUR_DIGITS = (
    ("person", "locker code"),
    ("project", "budget"),
    ("town", "founding year"),
    ("ship", "launch year"),
)
_PLACES = (32, 64)
_ROOM = 96
"""Tokens of an answer of 64 digits, at most, and of a few words around it."""


def digits(
    codec: Codec, tokens: int, count: int, seed: int, how: Manner = TRAINED
) -> Iterator[Item]:
    """`count` documents; three questions each: a plain fact, 32 digits, 64 digits."""

    def choose(names: world.Names) -> Sequence[world.Fact]:
        return [
            telling.tell(
                names,
                "person",
                "locker code",
                value="".join(names.rng.choice("0123456789") for _ in range(places)),
            )
            for places in _PLACES
        ]

    for i in range(count):
        told = telling.fresh(codec, tokens, seed + i, choose)
        rng = random.Random(seed + i)
        asked = [told.others[0], *told.chosen]
        yield Item(
            told.text,
            tuple(rng.choice(f.questions) + how.adds for f in asked),
            tuple((f.answer,) for f in asked),
            how.metric,
            max_tokens=max(how.max_tokens, _ROOM),
        )


def codes(
    codec: Codec, tokens: int, count: int, seed: int, how: Manner = TRAINED
) -> Iterator[Item]:
    """`count` documents with `CODES` facts of four digits each, all asked for in one chat."""

    def choose(names: world.Names) -> Sequence[world.Fact]:
        kinds = [_FOUR_DIGITS[n % len(_FOUR_DIGITS)] for n in range(CODES)]
        return [telling.tell(names, kind, noun) for kind, noun in kinds]

    for i in range(count):
        told = telling.fresh(codec, tokens, seed + i, choose)
        rng = random.Random(seed + i)
        yield Item(
            told.text,
            tuple(rng.choice(f.questions) + how.adds for f in told.chosen),
            tuple((f.answer,) for f in told.chosen),
            how.metric,
            max_tokens=how.max_tokens,
        )
