"""Several values in one answer: a chat asks for three facts one by one, and then for all at once.

The bundled model was trained to answer with one value. It answers the last question, which asks for
three, with at most one of them and gets at most a third of the score.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from minikv.cli.evaluation import metrics, telling
from minikv.cli.evaluation.files import Item
from minikv.cli.evaluation.tasks import TRAINED, Manner
from minikv.models.bundled import world
from minikv.models.bundled.exam import Codec

_ALL = " Answer with the values alone."
_ROOM = 64  # the most tokens of an answer with three values


def several(
    codec: Codec, tokens: int, count: int, seed: int, how: Manner = TRAINED
) -> Iterator[Item]:
    """`count` documents with five questions each: a fact about something else, three facts about a
    person, and these three in one question."""
    for i in range(count):
        nouns: list[str] = []
        entity = ""

        def choose(names: world.Names) -> Sequence[world.Fact]:
            nonlocal nouns, entity
            make, attributes = world.WORLD["person"]
            nouns = [a.noun for a in names.rng.sample(attributes, 3)]
            entity = make(names)
            return [telling.tell(names, "person", noun, entity) for noun in nouns]

        doc = telling.fresh(codec, tokens, seed + i, choose)
        rng = random.Random(seed + i)
        single = [doc.others[0], *doc.chosen]
        together = f"Tell me the {nouns[0]}, the {nouns[1]} and the {nouns[2]} of {entity}."
        yield Item(
            doc.text,
            (
                *(rng.choice(f.questions) + how.adds for f in single),
                together + (_ALL if how.adds else ""),
            ),
            (*((f.answer,) for f in single), tuple(f.answer for f in doc.chosen)),
            metrics.values_found,
            max_tokens=max(how.max_tokens, _ROOM),
        )
