"""Questions that are made here: facts, follow-ups and needles, from the bundled model's world.

The bundled model was trained on this world and answers with the value and nothing else. For any
other model the documents are plain English. The wording of its answers is not known, so it is told
what to answer, may write a sentence, and is scored by the value in it: see `Manner`.
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

    adds: a text after every question. max_tokens: the most tokens of an answer. least: tokens of
    the shortest answer that `facts` asks for.
    """

    adds: str
    metric: Metric
    max_tokens: int
    least: int


TRAINED = Manner("", metrics.exact, 16, 2)
"""For the bundled model. The first token of an answer is computed before the prompt is evicted, so
`facts` asks for values of at least two tokens."""

TOLD = Manner(" Answer with the value alone.", metrics.contains_words, 48, 1)
"""For any other model. Its tokenizer may have one token for most values, so `least` is 1."""


def manner(model: str | None) -> Manner:
    """The manner for the value of --model. None and the folder of the bundled model are the bundled
    model."""
    if model is None:
        return TRAINED
    return TRAINED if Path(model).expanduser().resolve() == BUNDLED.resolve() else TOLD


def facts(
    codec: Codec, tokens: int, count: int, seed: int, how: Manner = TRAINED, questions: int = 1
) -> Iterator[Item]:
    """`count` documents of `tokens` tokens with many facts, and at most `questions` questions each,
    which are asked independently. Their answers have at least `how.least` tokens, if a document has
    such facts."""
    for i in range(count):
        doc = exam.fresh(codec, tokens, seed + i)
        chosen = [f for f in doc.facts if len(codec.encode(f.answer)) >= how.least]
        item = _ask(doc.text, chosen or doc.facts, questions, seed + i, how)
        yield replace(item, apart=questions > 1)


def followup(
    codec: Codec, tokens: int, count: int, seed: int, how: Manner = TRAINED
) -> Iterator[Item]:
    """`count` documents with at most six questions each, in one chat."""
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
    """Texts with a single fact, which is stated once, at a given depth; `count` for each depth
    and length."""
    for length in lengths:
        for depth in depths:
            for i in range(count):
                # A text as the seed: no two are the same, as two sums could be.
                rng = random.Random(f"{seed} {length} {depth} {i}")
                yield _needle(codec, length, depth, rng, how)


def _needle(codec: Codec, length: int, depth: float, rng: random.Random, how: Manner) -> Item:
    doc = world.document(rng, 1, 1)
    fact = doc.facts[0]
    hay: list[str] = []
    size = len(codec.encode(doc.text))
    while size < length - 8:
        sentence = world.document(rng, 1, 0).text
        hay.append(sentence)
        size += len(codec.encode(" " + sentence))
    hay.insert(round(depth * len(hay)), doc.text)
    text = "\n\n".join(" ".join(hay[i : i + 5]) for i in range(0, len(hay), 5))
    return Item(
        text,
        (rng.choice(fact.questions) + how.adds,),
        ((fact.answer,),),
        how.metric,
        max_tokens=how.max_tokens,
        where=(depth, length),
    )
