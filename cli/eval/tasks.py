"""Generates questions: a needle, facts, chats of several questions, and long answers. They are
about documents of the bundled model's world; needles and facts also about a user's text.

The bundled model was trained on this world and answers with the value and nothing else. For any
other model the documents are just English. The wording of its answers is not known, so the question
asks for the value alone, an answer may be a sentence, and the value in it counts: see `Manner`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from minikv.checks import quoted
from minikv.cli.eval.items import Item, Metric, contains_words, exact
from minikv.errors import UsageError
from minikv.models import BUNDLED
from minikv.models.bundled import exam, world
from minikv.models.bundled.exam import Codec
from minikv.models.bundled.world import Fact

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
LEAST = exam.FACT_EVERY
"""Tokens of the shortest document with a fact to ask about. A needle's may be shorter."""


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


TRAINED = Manner("", exact, 16, 2)
"""For the bundled model. The first token of an answer is computed before the prompt is evicted, so
`facts` asks for values of at least two tokens."""

TOLD = Manner(" Answer with the value alone.", contains_words, 48, 1)
"""For any other model. Its tokenizer may have one token for most values, so `least` is 1."""


def manner(model: str | None) -> Manner:
    """The manner for this value of --model. None and the folder of the bundled model mean the
    bundled model."""
    bundled = model is None or Path(model).expanduser().resolve() == BUNDLED.resolve()
    return TRAINED if bundled else TOLD


def asking(text: str, facts: Sequence[Fact], rng: random.Random, how: Manner, **more: Any) -> Item:
    """A question for each of the facts, each in one of its wordings."""
    return Item(
        text,
        tuple(rng.choice(fact.questions) + how.adds for fact in facts),
        tuple((fact.answer,) for fact in facts),
        how.metric,
        max_tokens=how.max_tokens,
        **more,
    )


# -- a user's own text ----------------------------------------------------------------------------

_CITIES = "Lisbon Bergen Krakow Porto Ghent Turin Malmo Graz Vilnius Tampere Basel Zagreb".split()
_FIRST = "Ottoline Bartholomew Zephyrine Casimir Philippa Thaddeus Marguerite Leopold".split()
_LAST = "Vandermeer Okonkwo-Hale Szczepanski Featherstonehaugh Abernathy Lindqvist Moreau".split()
_WORDS = "marzipan tortoise lantern glacier saffron anvil juniper parachute obsidian kettle".split()
_PLACES = "Port Ellory|Saint Maubrac|Upper Kelvinhead|Lake Tarnowitz|New Quillfordshire".split("|")


@dataclass(frozen=True, slots=True)
class Haystack:
    """A text into whose parts facts are put: those `given`, or generated ones."""

    text: str
    given: Sequence[Fact] = ()

    def facts(self, rng: random.Random) -> list[Fact]:
        """The facts of a part."""
        return [*self.given] or made_facts(rng)


def made_facts(rng: random.Random) -> list[Fact]:
    """A code of five digits, a word, a name and a place, in any order."""
    city, other = rng.sample(_CITIES, 2)
    name = f"{rng.choice(_FIRST)} {rng.choice(_LAST)}"
    rows = (
        ("code", f"the access code of the {city} office", "What", str(rng.randint(10000, 99999))),
        ("word", "the secret password of the night guard", "What", rng.choice(_WORDS)),
        ("name", f"the head librarian of the {other} archive", "Who", name),
        ("place", "the meeting place of the beekeepers", "What", rng.choice(_PLACES)),
    )
    made = [
        Fact((f"T{noun[1:]} is {value}.",), (f"{who} is {noun}?",), value, kind)
        for kind, noun, who, value in rows
    ]
    rng.shuffle(made)
    return made


def given_fact(text: str) -> Fact:
    """The value of --needle: a sentence, a question and its answer, separated by |."""
    parts = [part.strip() for part in text.split("|")]
    if len(parts) != 3 or not all(parts):
        raise UsageError(
            f"cannot read the needle {quoted(text)}",
            "give 'SENTENCE | QUESTION | ANSWER', as in "
            "'The code of the shed is 48213. | What is the code of the shed? | 48213'",
        )
    sentence, question, answer = parts
    return Fact((sentence,), (question,), answer, "given")


def parts(codec: Codec, text: str, tokens: int) -> list[list[str]]:
    """The sentences of the parts of a text, each part of about `tokens` tokens. A shorter rest
    counts only if there is nothing else."""
    found: list[list[str]] = [[]]
    size = 0
    for sentence in re.split(r"(?<=[.!?])(?=\s)|(?<=\n)(?=\n)", text):
        size += len(codec.encode(sentence))
        if size > tokens and found[-1]:
            found.append([])
            size = len(codec.encode(sentence))
        found[-1].append(sentence)
    return found[:-1] if len(found) > 1 and size < 0.75 * tokens else found


def texts(codec: Codec, text: str, tokens: int, count: int, source: str) -> list[Item]:
    """At most `count` parts of a text, to be continued."""
    return [
        Item("".join(part).strip(), (), (), source=f"{source}, part {number}")
        for number, part in enumerate(parts(codec, text, tokens)[:count], 1)
    ]


def _with(sentences: Sequence[str], facts: Sequence[str], depths: Sequence[float]) -> str:
    """The text with each fact at its depth, in ascending order."""
    whole = [*sentences]
    for fact, depth in reversed([*zip(facts, depths, strict=True)]):
        whole.insert(round(depth * len(sentences)), f" {fact}")
    return "".join(whole).strip()


# -- facts and needles ----------------------------------------------------------------------------


def facts(
    codec: Codec,
    tokens: int,
    count: int,
    seed: int,
    how: Manner = TRAINED,
    questions: int = 1,
    hay: Haystack | None = None,
) -> Iterator[Item]:
    """`count` documents of `tokens` tokens with several facts each, spread evenly, and at most
    `questions` questions each, which are asked independently. In the world, answers have at least
    `how.least` tokens, if a document has such facts."""
    if hay is None:
        for i in range(count):
            doc, rng = exam.fresh(codec, tokens, seed + i), random.Random(seed + i)
            some = [f for f in doc.facts if len(codec.encode(f.answer)) >= how.least] or [
                *doc.facts
            ]
            few = rng.sample(some, min(questions, len(some)))
            yield asking(doc.text, few, rng, how, apart=questions > 1)
        return
    for i, part in enumerate(islice(cycle(parts(codec, hay.text, tokens)), count)):
        rng = random.Random(f"{seed} {i}")
        told = hay.facts(rng)
        depths = [(2 * j + 1) / (2 * len(told)) for j in range(len(told))]
        few = rng.sample(told, min(questions, len(told)))
        document = _with(part, [fact.statements[0] for fact in told], depths)
        groups = (few[0].kind,) if len(few) == 1 else ()
        yield asking(document, few, rng, how, apart=len(few) > 1, groups=groups)


def needle(
    codec: Codec,
    lengths: Sequence[int],
    count: int,
    seed: int,
    depths: Sequence[float] = DEPTHS,
    how: Manner = TRAINED,
    hay: Haystack | None = None,
) -> Iterator[Item]:
    """Texts with a single fact, which is stated once, at a given depth; `count` for each depth
    and length."""
    for length in lengths:
        cut = cycle(parts(codec, hay.text, length) if hay else [[""]])
        for depth in depths:
            for i in range(count):
                # A text as the seed, because sums of these numbers could coincide.
                rng = random.Random(f"{seed} {length} {depth} {i}")
                if hay:
                    fact = rng.choice(hay.facts(rng))
                    text = _with(next(cut), fact.statements, [depth])
                else:
                    text, fact = _dull(codec, rng, length, depth)
                yield asking(text, [fact], rng, how, groups=(f"at {depth:.0%}", f"of {length:,}"))


def _dull(codec: Codec, rng: random.Random, length: int, depth: float) -> tuple[str, Fact]:
    """A text of the world with a single fact, and that fact."""
    doc, hay = world.document(rng, 1, 1), list[str]()
    size = len(codec.encode(doc.text))
    while size < length - 8:
        hay.append(world.document(rng, 1, 0).text)
        size += len(codec.encode(" " + hay[-1]))
    hay.insert(round(depth * len(hay)), doc.text)
    text = "\n\n".join(" ".join(hay[i : i + 5]) for i in range(0, len(hay), 5))
    return text, doc.facts[0]


# -- chats ----------------------------------------------------------------------------------------

_LONGEST = 96  # tokens of an answer, at most


def _followup(codec: Codec, tokens: int, seed: int, how: Manner, number: int) -> Item:
    """At most six questions in one chat."""
    doc, rng = exam.fresh(codec, tokens, seed), random.Random(seed)
    return asking(doc.text, rng.sample(doc.facts, min(6, len(doc.facts))), rng, how)


def _long(codec: Codec, tokens: int, seed: int, how: Manner, number: int) -> Item:
    """One question for a value of 5 to 64 tokens, of each kind of `world.LONG` in turn. The
    document has two of the kind."""
    kind = [*world.LONG][number % len(world.LONG)]
    doc = exam.fresh(codec, tokens, seed, (kind, kind))
    fact = next(f for f in doc.facts if f.kind)
    told = replace(how, adds=" Answer with all of it, word for word." if how.adds else "")
    item = asking(doc.text, [fact], random.Random(seed), told)
    return replace(item, max_tokens=_LONGEST, groups=(kind,))


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
