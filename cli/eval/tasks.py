"""Questions that are made here, from the bundled model's world: a needle, facts, chats of several
questions, and long answers. One of the last two is a function that makes an item, and a row of
`CHATS`.

The bundled model was trained on this world and answers with the value and nothing else. For any
other model the documents are plain English. The wording of its answers is not known, so it is told
what to answer, may write a sentence, and is scored by the value in it: see `Manner`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minikv.cli.eval import metrics
from minikv.cli.eval.items import Item
from minikv.cli.eval.metrics import Metric
from minikv.models import BUNDLED
from minikv.models.bundled import exam, world
from minikv.models.bundled.exam import Codec

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


def asking(
    text: str, facts: Sequence[world.Fact], rng: random.Random, how: Manner, **more: Any
) -> Item:
    """A question for each of the facts, each in one of its wordings."""
    return Item(
        text,
        tuple(rng.choice(fact.questions) + how.adds for fact in facts),
        tuple((fact.answer,) for fact in facts),
        how.metric,
        max_tokens=how.max_tokens,
        **more,
    )


def facts(
    codec: Codec, tokens: int, count: int, seed: int, how: Manner = TRAINED, questions: int = 1
) -> Iterator[Item]:
    """`count` documents of `tokens` tokens with many facts, and at most `questions` questions each,
    which are asked independently. Their answers have at least `how.least` tokens, if a document has
    such facts."""
    for i in range(count):
        doc, rng = exam.fresh(codec, tokens, seed + i), random.Random(seed + i)
        some = [f for f in doc.facts if len(codec.encode(f.answer)) >= how.least] or [*doc.facts]
        few = rng.sample(some, min(questions, len(some)))
        yield asking(doc.text, few, rng, how, apart=questions > 1)


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
                doc, hay = world.document(rng, 1, 1), list[str]()
                size = len(codec.encode(doc.text))
                while size < length - 8:
                    hay.append(world.document(rng, 1, 0).text)
                    size += len(codec.encode(" " + hay[-1]))
                hay.insert(round(depth * len(hay)), doc.text)
                text = "\n\n".join(" ".join(hay[i : i + 5]) for i in range(0, len(hay), 5))
                yield asking(text, doc.facts[:1], rng, how, where=(depth, length))


# -- chats: each function makes the item of one document ------------------------------------------


def _followup(codec: Codec, tokens: int, seed: int, how: Manner, number: int) -> Item:
    """At most six questions in one chat."""
    doc, rng = exam.fresh(codec, tokens, seed), random.Random(seed)
    return asking(doc.text, rng.sample(doc.facts, min(6, len(doc.facts))), rng, how)


# -- long answers ----------------------------------------------------------------------------------

_LONGEST = 96  # tokens of an answer, at most


def _long(codec: Codec, tokens: int, seed: int, how: Manner, number: int) -> Item:
    """One question for a value of 5 to 64 tokens, of each kind of `world.LONG` in turn. The
    document has two of the kind."""
    kind = [*world.LONG][number % len(world.LONG)]
    doc = exam.fresh(codec, tokens, seed, (kind, kind))
    fact = next(f for f in doc.facts if f.kind)
    told = replace(how, adds=" Answer with all of it, word for word." if how.adds else "")
    item = asking(doc.text, [fact], random.Random(seed), told)
    return replace(item, max_tokens=_LONGEST, groups=(kind,))


# -- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChatTask:
    """A task. make(codec, tokens of a document, seed, how the model is asked, number of the
    document). questions: per chat. least: tokens of the shortest document with room for all."""

    make: Callable[[Codec, int, int, Manner, int], Item]
    questions: int
    least: int

    def items(
        self, codec: Codec, tokens: int, count: int, seed: int, how: Manner = TRAINED
    ) -> Iterator[Item]:
        """As many chats as `count` questions need."""
        for i in range(-(-count // self.questions)):
            yield self.make(codec, tokens, seed + i, how, i)


CHATS: Mapping[str, ChatTask] = {
    "followup": ChatTask(_followup, 6, LEAST),
    "long": ChatTask(_long, 1, 800),
}
