"""Long numbers: single values of 32 and 64 digits (`digits`), or many of four digits (`codes`).

Eviction loses long values first (H2O falls from 100 to 35 % between 7 and 64 digits: arXiv
2407.01527). The bundled model was trained on codes of four digits and ends an answer there. So with
it, `digits` only shows whether two caches give the same answers. It can answer `codes`: sixteen
facts of four digits, asked for one after the other. Together they are a number of 64 digits, which
is right if all are right; the first eight are a number of 32 digits.
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
"""The most tokens of an answer: 64 digits and a few words."""


def digits(
    codec: Codec, tokens: int, count: int, seed: int, how: Manner = TRAINED
) -> Iterator[Item]:
    """`count` documents with three questions each: a plain fact, 32 digits and 64 digits."""

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
        doc = telling.fresh(codec, tokens, seed + i, choose)
        rng = random.Random(seed + i)
        asked = [doc.others[0], *doc.chosen]
        yield Item(
            doc.text,
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
        doc = telling.fresh(codec, tokens, seed + i, choose)
        rng = random.Random(seed + i)
        yield Item(
            doc.text,
            tuple(rng.choice(f.questions) + how.adds for f in doc.chosen),
            tuple((f.answer,) for f in doc.chosen),
            how.metric,
            max_tokens=how.max_tokens,
        )
