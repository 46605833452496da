"""The invented world on which the bundled model is trained and tested.

A document is a sequence of plausible sentences. It states facts about invented people, towns,
ships, firms and projects, each up to three times and in several wordings, as in reports. A chat
asks for some of them, again in several wordings. Every document has newly composed names. Within a
document, names share as few parts as the lists allow, as in a real report. In every wording the
answer comes after the words that identify it, as in most reference texts; such a small model does
not learn the other order.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_DATA: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("world.toml").read_text("utf-8")
)
WORDS = {name: words.split() for name, words in _DATA["words"].items()}
"""Lists of words by name: parts of names, values, and words for the sentences without a fact."""

TELLINGS = 3  # how often a fact is stated, at most


class Names:
    """Draws names and values. A part of a name is used again only when its list is exhausted."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._used: set[str] = set()
        self._left: dict[str, list[str]] = {}

    def part(self, kind: str) -> str:
        """A word from this list of `WORDS`. Each is used once before any is used twice."""
        if not self._left.get(kind):
            self._left[kind] = self.rng.sample(WORDS[kind], len(WORDS[kind]))
        return self._left[kind].pop()

    def fresh(self, make: Callable[[], str]) -> str:
        """The first result of `make` that is new in this document."""
        for _ in range(1000):
            name = make()
            if name not in self._used:
                self._used.add(name)
                return name
        raise ValueError("the world has run out of names for one document")

    def town(self) -> str:
        return self.fresh(lambda: self.part("heads") + self.rng.choice(WORDS["town tails"]))

    def surname(self) -> str:
        return self.fresh(lambda: self.part("heads") + self.rng.choice(WORDS["surname tails"]))

    def person(self) -> str:
        return f"{self.part('first names')} {self.surname()}"

    def ship(self) -> str:
        return self.fresh(lambda: f"the {self.part('adjectives')} {self.part('nouns')}")

    def firm(self) -> str:
        return f"{self.surname()} {self.rng.choice(('Works', 'Mills', 'Shipping', 'Brothers'))}"

    def project(self) -> str:
        return self.fresh(lambda: f"Project {self.part('adjectives')} {self.part('nouns')}")

    def year(self) -> str:
        return str(self.rng.randint(1710, 1989))

    def code(self) -> str:
        return str(self.rng.randint(1000, 9999))

    def alias(self) -> str:
        """One or two words of three to five syllables."""
        rng = self.rng
        words = range(rng.randint(1, 2))
        made = ("".join(rng.choices(WORDS["syllables"], k=rng.randint(3, 5))) for _ in words)
        return " ".join(word.capitalize() for word in made)

    def digits(self) -> str:
        """A number of five to sixteen digits."""
        size = self.rng.randint(5, 16)
        return str(self.rng.randint(10 ** (size - 1), 10**size - 1))

    def clause(self) -> str:
        """A statement of what somebody did, or a sentence without a fact, in lower case and without
        a full stop."""
        if self.rng.random() < 0.4:
            text = filler(self.rng)[:-1]
            return text[0].lower() + text[1:]
        slots = {key: self.rng.choice(WORDS[key]) for key in _EVENT}
        p, q, t = self.person(), self.person(), self.town()
        return self.rng.choice(_SAID["event"]).format(p=p, q=q, t=t, c=self.number(), **slots)

    def three(self) -> str:
        """Three of one kind."""
        make = self.rng.choice((self.person, self.town, self.ship, lambda: self.part("goods")))
        return f"{make()}, {make()} and {make()}"

    def passage(self) -> str:
        """Two to four clauses, 25 to 65 tokens."""
        return "; ".join(self.clause() for _ in range(self.rng.randint(2, 4)))

    def number(self) -> str:
        low, high = (11, 99) if self.rng.random() < 0.5 else (100, 999)
        return str(self.rng.randint(low, high))


@dataclass(frozen=True, slots=True)
class Attribute:
    """One property of a kind of entity.

    noun: fits "the NOUN of X". told: a further statement, and asked: further questions, with {e}
    for the entity and {v} for the value.
    """

    noun: str
    who: str
    draw: Callable[[Names], str]
    told: str
    asked: tuple[str, ...]


def _attribute(noun: str, kind: str, told: str, *asked: str) -> Attribute:
    """The attribute from a line in world.toml."""
    own = getattr(Names, kind, None)
    draw: Callable[[Names], str] = own or (lambda names: names.rng.choice(WORDS[kind]))
    return Attribute(noun, "Who" if kind == "person" else "What", draw, told, asked)


WORLD: dict[str, tuple[Callable[[Names], str], tuple[Attribute, ...]]] = {
    kind: (getattr(Names, kind), tuple(_attribute(noun, *row) for noun, row in rows.items()))
    for kind, rows in _DATA["world"].items()
}
"""How each kind of entity is named, and its possible attributes."""
_SAID: dict[str, tuple[str, ...]] = {name: tuple(of) for name, of in _DATA["sentences"].items()}
LONG: dict[str, tuple[tuple[str, Attribute], ...]] = {
    value: tuple((kind, _attribute(noun, value, *row)) for noun, (kind, *row) in rows.items())
    for value, rows in _DATA["long"].items()
}
"""Facts with values of many tokens: by kind of value, the kinds of entity and their attributes."""
_SLOTS = ("adj", "thing", "place", "time")
_EVENT = (*_SLOTS, "goods", "animals", "foods", "colours", "months", "instruments")


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact: how it is stated, and the possible questions about it. kind: a key of `LONG`, or
    ""."""

    statements: tuple[str, ...]
    questions: tuple[str, ...]
    answer: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Document:
    """A generated text and the facts in it."""

    text: str
    facts: tuple[Fact, ...]


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def filler(rng: random.Random, entities: Sequence[str] = ()) -> str:
    """A sentence without a fact. It may mention one of `entities`."""
    if entities and rng.random() < 0.15:
        pattern = rng.choice(_SAID["mention"])
    else:
        pattern = rng.choice(_SAID["filler"])
    slots = {key: rng.choice(WORDS[key]) for key in _SLOTS}
    return _sentence(pattern.format(e=rng.choice(entities) if entities else "", **slots))


def stated(rng: random.Random, entity: str, attribute: Attribute, value: str) -> Fact:
    """The fact that `value` is the `attribute` of `entity`, stated up to `TELLINGS` times."""
    told_as = []
    for pattern in rng.sample(_SAID["told"] + (attribute.told,) * 4, rng.randint(1, TELLINGS)):
        text = pattern.format(n=attribute.noun, e=entity, v=value)
        if value[0] in "aeiou":
            text = text.replace(f" a {value}", f" an {value}")
        if rng.random() < 0.25:
            text = f"{rng.choice(_SAID['openers'])} {text}"
        told_as.append(_sentence(text))
    shapes = [
        a.format(w=attribute.who, lw=attribute.who.lower(), n=attribute.noun, e=entity)
        for a in _SAID["asked"] + attribute.asked * 3
    ]
    return Fact(tuple(told_as), tuple(shapes), value)


def some_facts(rng: random.Random, names: Names, count: int) -> tuple[list[Fact], list[str]]:
    """`count` facts, and the entities that they belong to."""
    facts: list[Fact] = []
    entities: list[str] = []
    while len(facts) < count:
        make, attributes = WORLD[rng.choice(list(WORLD))]
        entity = make(names)
        entities.append(entity)
        told = min(rng.randint(1, 3), count - len(facts))
        for attribute in rng.sample(attributes, min(told, len(attributes))):
            facts.append(stated(rng, entity, attribute, attribute.draw(names)))
    return facts, entities


def long_facts(
    rng: random.Random, names: Names, kinds: Sequence[str]
) -> tuple[list[Fact], list[str]]:
    """A fact of each of these kinds in `LONG`, and the entities that they belong to."""
    facts, entities = [], []
    for value in kinds:
        kind, attribute = rng.choice(LONG[value])
        entities.append(WORLD[kind][0](names))
        told = stated(rng, entities[-1], attribute, attribute.draw(names))
        facts.append(replace(told, kind=value))
    return facts, entities


def document(rng: random.Random, sentences: int, facts: int, long: Sequence[str] = ()) -> Document:
    """A text of `sentences` sentences that states `facts` facts with short values, and one of each
    of the kinds `long` of `LONG`. These must not be more than the sentences.

    If there is not room for all statements, each fact is stated once before any is stated again.
    """
    names = Names(rng)
    told, entities = some_facts(rng, names, facts)
    more, others = long_facts(rng, names, long)
    return written(rng, sentences, [*told, *more], [*entities, *others])


def written(
    rng: random.Random, sentences: int, facts: Sequence[Fact], entities: list[str]
) -> Document:
    """Like `document`, with these facts. entities: to be mentioned in sentences without a fact."""
    order = list(facts)
    rng.shuffle(order)
    told = [f.statements[i] for i in range(TELLINGS) for f in order if i < len(f.statements)]
    told = told[:sentences]
    rng.shuffle(told)
    slots = set(rng.sample(range(sentences), len(told)))
    lines = [told.pop() if i in slots else filler(rng, entities) for i in range(sentences)]
    paragraphs: list[str] = []
    while lines:
        size = rng.randint(3, 7)
        paragraphs.append(" ".join(lines[:size]))
        lines = lines[size:]
    return Document("\n\n".join(paragraphs), tuple(order))


def questions(rng: random.Random, doc: Document, count: int) -> Iterator[tuple[str, str]]:
    """`count` pairs (question, answer), about different facts as long as there are enough."""
    order = list(doc.facts)
    rng.shuffle(order)
    for i in range(count):
        fact = order[i % len(order)]
        yield rng.choice(fact.questions), fact.answer
