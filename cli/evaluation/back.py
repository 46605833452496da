"""A chat that returns to earlier things: to a person that an answer named, to an earlier topic, to
an earlier question, and to an earlier answer itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from minikv.cli.evaluation import telling
from minikv.cli.evaluation.files import Item
from minikv.cli.evaluation.tasks import TRAINED, Manner
from minikv.models.bundled import world
from minikv.models.bundled.exam import Codec


def back(codec: Codec, tokens: int, count: int, seed: int, how: Manner = TRAINED) -> Iterator[Item]:
    """`count` documents with seven questions each: a town's mayor, another fact, the birthplace of
    that mayor, another fact, the town's export, its mayor in other words, and what the first answer
    was. The bundled model was not trained on the last kind of question."""
    for i in range(count):
        doc = telling.fresh(codec, tokens, seed + i, _choose)
        rng = random.Random(seed + i)
        mayor, birthplace, export = doc.chosen
        one, other, *_ = doc.others
        first, again = rng.sample(sorted(set(mayor.questions)), 2)
        asked = [
            (first, mayor),
            (rng.choice(one.questions), one),
            (rng.choice(birthplace.questions), birthplace),
            (rng.choice(other.questions), other),
            (rng.choice(export.questions), export),
            (again, mayor),
            ("What was your answer to my first question?", mayor),
        ]
        yield Item(
            doc.text,
            tuple(question + how.adds for question, _ in asked),
            tuple((fact.answer,) for _, fact in asked),
            how.metric,
            max_tokens=how.max_tokens,
        )


def _choose(names: world.Names) -> Sequence[world.Fact]:
    town, mayor = names.town(), names.person()
    return [
        telling.tell(names, "town", "mayor", town, mayor),
        telling.tell(names, "person", "birthplace", mayor),
        telling.tell(names, "town", "main export", town),
    ]
