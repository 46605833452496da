"""Questions that are made here: facts, follow-ups and needles, from the bundled model's world.

The world is known to the bundled model, which answers with the value and nothing else; to any other
model its documents are plain English. How such a model words an answer is its own affair, so it is
told what is wanted, has room for a sentence and is scored by the value in it: see `Manner`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from minikv.cli.evaluation import metrics
from minikv.cli.evaluation.files import Item
from minikv.cli.evaluation.metrics import Metric
from minikv.models import BUNDLED
from minikv.models.bundled import exam, world
from minikv.models.bundled.exam import Codec

FOLLOWUPS = 6
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
LEAST = exam.FACT_EVERY
"""Tokens of the shortest document with a fact to ask for. A needle's may be shorter."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How a model is asked, and how its answers are scored.

    `adds` stands after every question; `max_tokens` are an answer's, at most; `least` are the
    tokens of the shortest answer that `facts` asks for.
    """

    adds: str
    metric: Metric
    max_tokens: int
    least: int


TRAINED = Manner("", metrics.exact, 16, 2)
"""The bundled model's. The first token of an answer is decided before any eviction, so that `facts`
asks for two and more; another model's tokenizer has most of this world's words in one."""

TOLD = Manner(" Answer with the value alone.", metrics.contains_words, 48, 1)
"""Any other model's."""


def manner(model: str | None) -> Manner:
    """That of a model as --model names it; None is the bundled one, which its folder is, too."""
    if model is None:
        return TRAINED
    return TRAINED if Path(model).expanduser().resolve() == BUNDLED.resolve() else TOLD


def facts(
    codec: Codec, tokens: int, count: int, seed: int, how: Manner = TRAINED, questions: int = 1
) -> Iterator[Item]:
    """`count` documents of `tokens` tokens with many facts and so many questions, each of which is
    asked apart, with its document. Only answers of `how.least` tokens and more, if there are any;
    a document with fewer of them has fewer questions."""
    for i in range(count):
        doc = exam.fresh(codec, tokens, seed + i)
        chosen = [f for f in doc.facts if len(codec.encode(f.answer)) >= how.least]
        item = _ask(doc.text, chosen or doc.facts, questions, seed + i, how)
        yield replace(item, apart=questions > 1)


def followup(
    codec: Codec, tokens: int, count: int, seed: int, how: Manner = TRAINED
) -> Iterator[Item]:
    """`count` documents, each with six questions in one chat."""
    for i in range(count):
        doc = exam.fresh(codec, tokens, seed + i)
        yield _ask(doc.text, doc.facts, FOLLOWUPS, seed + i, how)


def _ask(text: str, chosen: Sequence[world.Fact], asked: int, seed: int, how: Manner) -> Item:
    rng = random.Random(seed)
    few = rng.sample(list(chosen), min(asked, len(chosen)))
    return Item(
        text,
        tuple(rng.choice(f.questions) + how.adds for f in few),
        tuple((f.answer,) for f in few),
        how.metric,
        max_tokens=how.max_tokens,
    )


def needle(
    codec: Codec,
    lengths: Sequence[int],
    count: int,
    seed: int,
    depths: Sequence[float] = DEPTHS,
    how: Manner = TRAINED,
) -> Iterator[Item]:
    """One fact told once at a depth of a text without others, `count` for each depth and length."""
    for length in lengths:
        for depth in depths:
            for i in range(count):
                # A text, of which no two are the same, where a sum could be.
                rng = random.Random(f"{seed} {length} {depth} {i}")
                yield _needle(codec, length, depth, rng, how)


def _needle(codec: Codec, length: int, depth: float, rng: random.Random, how: Manner) -> Item:
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
        text,
        (rng.choice(fact.questions) + how.adds,),
        ((fact.answer,),),
        how.metric,
        max_tokens=how.max_tokens,
        where=(depth, length),
    )
