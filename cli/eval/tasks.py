"""Questions that are made here, from the bundled model's world: a needle, facts, chats of several
questions, and long answers. A task is a function that makes items, and a row of `CHATS` if it is a
chat.

The bundled model was trained on this world and answers with the value and nothing else. For any
other model the documents are plain English. The wording of its answers is not known, so it is told
what to answer, may write a sentence, and is scored by the value in it: see `Manner`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from minikv.cli.eval import metrics
from minikv.cli.eval.files import Item
from minikv.cli.eval.metrics import Metric
from minikv.errors import UsageError
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


# -- documents with chosen facts -------------------------------------------------------------------

ROOMY = 500
"""Tokens of the shortest document that has room for every chosen fact of every task."""

_OTHERS = 3  # facts beside the chosen ones, at the least


@dataclass(frozen=True, slots=True)
class Told:
    """A document's text, the chosen facts in the order in which they were given, and the others."""

    text: str
    chosen: tuple[world.Fact, ...]
    others: tuple[world.Fact, ...]


def tell(
    names: world.Names,
    kind: str,
    noun: str,
    entity: str | None = None,
    value: str | None = None,
) -> world.Fact:
    """The fact that `value` is the `noun` of `entity`, which is of a kind in `world.WORLD`. An
    entity or value that is not given is drawn at random."""
    make, attributes = world.WORLD[kind]
    attribute = next(a for a in attributes if a.noun == noun)
    entity = make(names) if entity is None else entity
    value = attribute.draw(names) if value is None else value
    return world.stated(names.rng, entity, attribute, value)


def fresh(
    codec: Codec, tokens: int, seed: int, choose: Callable[[world.Names], Sequence[world.Fact]]
) -> Told:
    """A document of `tokens` tokens, within 16, with the facts that `choose` makes; the same for
    the same seed. Raises UsageError if the facts do not fit into so few tokens."""
    sentences = tokens // 12
    while True:
        rng = random.Random(seed)
        names = world.Names(rng)
        chosen = choose(names)
        usual = min(sentences, tokens // exam.FACT_EVERY, 110)
        others, entities = world.some_facts(rng, names, max(_OTHERS, usual - len(chosen)))
        told = len(chosen) + len(others)
        if told > sentences:  # of a small vocabulary: a sentence has many tokens
            raise UsageError(
                f"a document of {tokens:,} tokens has about {sentences} sentences with this "
                f"tokenizer, too few to tell {told} facts",
                "give a larger --length, or another task",
            )
        doc = world.written(rng, sentences, [*chosen, *others], entities)
        size = len(codec.encode(doc.text))
        if abs(size - tokens) <= 16:
            return Told(doc.text, tuple(chosen), tuple(others))
        sentences = exam.nearer(sentences, size, tokens)
        seed += 1 << 40


# -- chats -----------------------------------------------------------------------------------------


def back(codec: Codec, tokens: int, count: int, seed: int, how: Manner = TRAINED) -> Iterator[Item]:
    """`count` documents with seven questions each: a town's mayor, another fact, the birthplace of
    that mayor, another fact, the town's export, its mayor in other words, and what the first answer
    was. The bundled model was not trained on the last kind of question."""
    for i in range(count):
        doc = fresh(codec, tokens, seed + i, _mayor)
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


def _mayor(names: world.Names) -> Sequence[world.Fact]:
    town, mayor = names.town(), names.person()
    return [
        tell(names, "town", "mayor", town, mayor),
        tell(names, "person", "birthplace", mayor),
        tell(names, "town", "main export", town),
    ]


CODES = 16
_FOUR_DIGITS = (
    ("person", "locker code"),
    ("project", "budget"),
    ("town", "founding year"),
    ("ship", "launch year"),
)


def codes(
    codec: Codec, tokens: int, count: int, seed: int, how: Manner = TRAINED
) -> Iterator[Item]:
    """`count` documents with `CODES` facts of four digits each, all asked for in one chat."""

    def choose(names: world.Names) -> Sequence[world.Fact]:
        kinds = [_FOUR_DIGITS[n % len(_FOUR_DIGITS)] for n in range(CODES)]
        return [tell(names, kind, noun) for kind, noun in kinds]

    for i in range(count):
        doc = fresh(codec, tokens, seed + i, choose)
        rng = random.Random(seed + i)
        yield Item(
            doc.text,
            tuple(rng.choice(f.questions) + how.adds for f in doc.chosen),
            tuple((f.answer,) for f in doc.chosen),
            how.metric,
            max_tokens=how.max_tokens,
        )


QUESTIONS = 4


def interview(
    codec: Codec, tokens: int, count: int, seed: int, how: Manner = TRAINED
) -> Iterator[Item]:
    """`count` documents with `QUESTIONS` questions each, about facts whose values have at least
    `how.least` tokens; about any facts, if the document has too few of those."""
    for i in range(count):
        doc, rng = exam.fresh(codec, tokens, seed + i), random.Random(seed + i)
        long = [f for f in doc.facts if len(codec.encode(f.answer)) >= how.least]
        few = rng.sample(long if len(long) >= QUESTIONS else list(doc.facts), QUESTIONS)
        yield Item(
            doc.text,
            tuple(rng.choice(f.questions) + how.adds for f in few),
            tuple((f.answer,) for f in few),
            how.metric,
            max_tokens=how.max_tokens,
            at_once=True,
        )


# -- long answers ----------------------------------------------------------------------------------

TOKENS = (4, 8, 16, 32, 64)
"""The lengths of answers, used in turn. An answer is at most a name or a sentence longer."""
LONG = 800
"""Tokens of the shortest document with room for all long facts."""

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
    """A list of names of people, of at least `tokens` tokens."""
    listed = names.person()
    while len(codec.encode(listed)) < tokens:
        listed += f", {names.person()}"
    return listed


def sentences(codec: Codec, names: world.Names, tokens: int) -> str:
    """Sentences without facts, of at least `tokens` tokens, without the last full stop."""
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
    """A fact whose value has about `tokens` tokens, stated once in the document."""
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
    """`count` documents with one question each, for a list of names. The bundled model's answer
    must be exact; another model's score is the share of the names that its answer has."""
    for i in range(count):
        doc, rng = _told_long(codec, tokens, seed + i, listed, TOKENS[i % len(TOKENS)])
        fact = doc.chosen[0]
        names = (fact.answer,) if how is TRAINED else tuple(fact.answer.split(", "))
        metric = metrics.exact if how is TRAINED else metrics.values_found
        yield _long_item(doc.text, fact, names, rng, how, metric)


def passage(
    codec: Codec, tokens: int, count: int, seed: int, how: Manner = TRAINED
) -> Iterator[Item]:
    """`count` documents with one question each, for a passage to copy word for word."""
    for i in range(count):
        doc, rng = _told_long(codec, tokens, seed + i, copied, TOKENS[i % len(TOKENS)])
        fact = doc.chosen[0]
        yield _long_item(doc.text, fact, (fact.answer,), rng, how, how.metric)


def _told_long(
    codec: Codec,
    tokens: int,
    seed: int,
    make: Callable[[Codec, world.Names, int], world.Fact],
    length: int,
) -> tuple[Told, random.Random]:
    def choose(names: world.Names) -> Sequence[world.Fact]:
        others = [names.rng.choice(TOKENS) for _ in range(_BESIDE)]
        return [make(codec, names, n) for n in (length, *others)]

    return fresh(codec, tokens, seed, choose), random.Random(seed)


def _long_item(
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


# -- the table -------------------------------------------------------------------------------------

Make = Callable[[Codec, int, int, int, Manner], Iterator[Item]]
"""(codec, tokens of a document, chats, seed, how the model is asked) -> items."""


@dataclass(frozen=True, slots=True)
class ChatTask:
    """A task. questions: per chat. least: tokens of the shortest document."""

    make: Make
    questions: int
    least: int = ROOMY

    def items(
        self, codec: Codec, tokens: int, count: int, seed: int, how: Manner
    ) -> Iterator[Item]:
        """As many chats as `count` questions need."""
        return self.make(codec, tokens, -(-count // self.questions), seed, how)


CHATS: Mapping[str, ChatTask] = {
    "followup": ChatTask(followup, FOLLOWUPS, LEAST),
    "codes": ChatTask(codes, CODES),
    "back": ChatTask(back, 7),
    "interview": ChatTask(interview, QUESTIONS, LEAST * QUESTIONS),
    "lists": ChatTask(lists, 1, LONG),
    "passage": ChatTask(passage, 1, LONG),
}
