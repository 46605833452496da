"""Counting, and the most frequent value: questions that no single passage answers.

Methods that attend to the top k tokens only fail on these (MagicPIG, arXiv 2410.16179). RULER has
such tasks as CWE and FWE. The bundled model was not trained on such questions. With it, they only
show whether two caches give the same answers.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence

from minikv.cli.evaluation import telling
from minikv.cli.evaluation.files import Item
from minikv.cli.evaluation.tasks import TRAINED, Manner
from minikv.models.bundled import world
from minikv.models.bundled.exam import Codec

_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
).split()
_MOST = (4, 9)  # how many people have the most frequent trade
_REST = 3  # other trades, each of one to three people


def count(
    codec: Codec, tokens: int, chats: int, seed: int, how: Manner = TRAINED
) -> Iterator[Item]:
    """`chats` documents with three questions each: a plain fact, the most frequent trade, and how
    many people have it."""
    for i in range(chats):
        doc, trade, people = _counted(codec, tokens, seed + i)
        rng = random.Random(seed + i)
        number = (str(people), *_WORDS[people : people + 1])
        yield Item(
            doc.text,
            tuple(
                question + how.adds
                for question in (
                    rng.choice(doc.others[0].questions),
                    "Which trade do most people in the text have?",
                    f"How many people in the text have the trade of {trade}?",
                )
            ),
            ((doc.others[0].answer,), (trade,), number),
            how.metric,
            max_tokens=how.max_tokens,
        )


def _counted(codec: Codec, tokens: int, seed: int) -> tuple[telling.Told, str, int]:
    """A document, its most frequent trade and how many people have that."""
    while True:
        doc = telling.fresh(codec, tokens, seed, _choose)
        tally = Counter(f.answer for f in (*doc.chosen, *doc.others) if _is_trade(f))
        (trade, people), (_, second) = tally.most_common(2)
        if people > second:
            return doc, trade, people
        seed += 1 << 50  # because of the other facts, two trades are equally frequent


def _choose(names: world.Names) -> Sequence[world.Fact]:
    trades = names.rng.sample(world.TRADES, 1 + _REST)
    counts = [names.rng.randint(*_MOST), *(names.rng.randint(1, 3) for _ in range(_REST))]
    return [
        telling.tell(names, "person", "trade", value=trade)
        for trade, people in zip(trades, counts, strict=True)
        for _ in range(people)
    ]


def _is_trade(fact: world.Fact) -> bool:
    return any(" the trade of " in question for question in fact.questions)
