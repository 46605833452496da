"""The invented world that the bundled model is trained on and measured in.

A document is a sequence of plausible sentences. It states facts about invented people, towns,
ships, firms and projects, each up to three times and in several wordings, as in reports. A chat
asks for some of them, again in several wordings. Names are composed anew for every document. Within
a document, they share as few parts as the lists allow, as in a real report. In every wording the
answer comes after the words that identify it, as in most reference texts; such a small model does
not learn the other order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

_WORDS = """
heads: Vel Tor Mar Bri Kal Dun Hes Lor Fen Gal Ost Ral Sel Tam Ul Wen Yar Zin Cor Dra Eb Fal Gri
  Hol Is Jor Kes Lun Mor Nar Ob Pel Quin Ros Stur Tre Und Vas Wil Yev Zor Al Bel Cas Dor Esk Fro
  Gar Hal Ing Jas Kor Lam Mil Nor Orm Pra Rud Sten Thal Urs Vin War Xan Yol Zem
town tails: mora dale wick by ton ford stead haven len gate holm mere ness worth bury port field
  bridge combe minster thorpe cliff moor water brook
surname tails: vin ske man son rick aldi ova eni bart quist ander olt ezzo ikov hart land strom
  berg ette inge osk ulf aric ema
first names: Tarin Odile Marek Sanna Ivo Petra Lukas Wanda Anton Greta Felix Nadia Oskar Livia
  Boris Clara Henrik Irma Jonas Katya Leon Mira Nils Olga Pavel Rosa Stefan Tilda Viktor Yara Axel
  Berta Casper Dora Emil Frida Georg Hanna Igor Judit Karl Lena Milo Nora Otto Paula Ruben Selma
  Theo Ulla Vera Willem Xenia Yuri Zoe Aldo Bruna Cyril Delia Edgar Flora Gustav Hilda Ines
adjectives: Silver Golden Crimson Northern Southern Quiet Brave Wandering Iron Copper Distant
  Gentle Bright Hidden Lonely Swift Ancient Merry Frozen Amber Scarlet Western Eastern Humble Proud
  Restless Faithful Bold Misty Velvet
nouns: Heron Lantern Anchor Falcon Compass Willow Harvest Beacon Raven Thistle Otter Meadow Comet
  Swallow Harbour Juniper Badger Horizon Orchard Pelican Sparrow Tempest Marigold Cedar Summit
  Ember Dolphin Granite Clover Voyager
colours: red blue green yellow purple orange white black grey brown pink turquoise violet maroon
  beige
animals: fox owl bear wolf hare stag swan goat lynx crane toad horse eagle seal mole tiger parrot
  rabbit turtle donkey
instruments: violin flute cello piano harp drum trumpet guitar oboe organ clarinet banjo tuba lute
trades: baker miller weaver carpenter doctor teacher printer surveyor gardener tailor locksmith
  lawyer chemist painter farmer sailor mason librarian engineer potter clockmaker nurse pilot
  butcher
goods: wool salt timber copper glass honey paper rope cheese linen tea coal silk iron soap leather
  grain wine pottery amber oil candles cotton fish apples tin lamps tobacco spices barley
foods: soup bread plums rice pancakes beans dumplings herring pie stew noodles walnuts cherries
  mushrooms porridge olives
months: January February March April May June July August September October November December
code words: mirror ladder pepper window candle button river needle basket feather hammer pebble
  ribbon saddle thunder whistle blanket cabbage engine magnet
adj: cold warm dry strange heavy narrow pleasant dull bright noisy gentle rough careful broken
  simple famous empty modest curious plain
thing: wagon clock fence barrel ledger map stove bench bell carpet statue gate parcel wheel mill
  boat roof painting kettle tower
place: market square harbour garden kitchen chapel station yard library cellar hall valley meadow
  forest office street inn warehouse courtyard island
time: week month season morning evening winter summer autumn spring year
"""
WORDS = {
    key: words.split()
    for key, _, words in (line.partition(": ") for line in _WORDS.replace("\n  ", " ").splitlines())
}
"""Lists of words by name: parts of names, values, and what the sentences without a fact need."""

_WORLD = """
town:
mayor | person | the people of {e} elected as mayor {v} | Who is mayor in {e}?
founding year | year | {e} was founded in {v} | When was {e} founded?
  | In which year was {e} founded?
main export | goods | {e} exports mostly {v} | What does {e} export?
emblem | animals | on the emblem of {e} stands a {v} | Which animal is on the emblem of {e}?
schoolteacher | person | the school of {e} is led by the teacher {v}
  | Who teaches at the school of {e}?
river | town | through {e} flows the river {v} | Which river flows through {e}?
festival month | months | {e} holds its festival in {v} | When does {e} hold its festival?
number of wells | number | the wells of {e} number {v} | How many wells are in {e}?
person:
trade | trades | {e} works as a {v} | What does {e} work as? | What does {e} do for a living?
birthplace | town | {e} was born in {v} | Where was {e} born?
favourite colour | colours | the colour that {e} likes best is {v}
  | Which colour does {e} like best?
instrument | instruments | {e} plays the {v} | What does {e} play?
  | Which instrument does {e} play?
pet | animals | {e} keeps a tame {v} | Which animal does {e} keep?
favourite dish | foods | for supper {e} always orders {v} | What does {e} order for supper?
locker code | code | the locker of {e} opens with {v} | What opens the locker of {e}?
neighbour | person | next door to {e} lives {v} | Who lives next door to {e}?
room | number | {e} sleeps in room {v} | In which room does {e} sleep?
ship:
captain | person | in command of {e} is {v} | Who commands {e}?
home port | town | {e} sails from the port of {v} | From which port does {e} sail?
cargo | goods | {e} carries {v} | What does {e} carry?
launch year | year | {e} was launched in {v} | When was {e} launched?
sail colour | colours | the sails of {e} are {v} | Which colour are the sails of {e}?
cook | person | the meals on {e} are cooked by {v} | Who cooks on {e}?
firm:
director | person | {e} is directed by {v} | Who directs {e}?
seat | town | {e} has its seat in {v} | Where does {e} have its seat?
product | goods | {e} makes {v} | What does {e} make?
number of workers | number | the workers of {e} number {v} | How many workers does {e} have?
accountant | person | the books of {e} are kept by {v} | Who keeps the books of {e}?
project:
leader | person | {e} is led by {v} | Who leads {e}?
code word | code words | {e} goes by the code word {v} | Which code word stands for {e}?
site | town | {e} is being built in {v} | Where is {e} being built?
budget | code | {e} may spend {v} | How much may {e} spend?
start month | months | {e} begins in {v} | When does {e} begin?
"""
"""What may be told of each kind of entity: a noun, what the value is (a method of `Names` or a list
of `WORDS`), a statement, and questions. {e} is the entity, {v} the value."""


class Names:
    """Draws names and values. A part of a name is used again only when its list is exhausted."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._used: set[str] = set()
        self._left: dict[str, list[str]] = {}

    def part(self, kind: str) -> str:
        """A word of this list of `WORDS`. Each is used once before any is used twice."""
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

    def number(self) -> str:
        low, high = (11, 99) if self.rng.random() < 0.5 else (100, 999)
        return str(self.rng.randint(low, high))


@dataclass(frozen=True, slots=True)
class Attribute:
    """One property of a kind of entity.

    noun: fits "the NOUN of X". told: further statements, and asked: further questions, with {e} for
    the entity and {v} for the value.
    """

    noun: str
    who: str
    draw: Callable[[Names], str]
    told: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()


def _attribute(line: str) -> Attribute:
    """A line of `_WORLD`."""
    noun, kind, told, *asked = line.split(" | ")
    own = getattr(Names, kind, None)
    draw: Callable[[Names], str] = own or (lambda names: names.rng.choice(WORDS[kind]))
    return Attribute(noun, "Who" if kind == "person" else "What", draw, (told,), tuple(asked))


def _sections(text: str) -> Iterator[tuple[str, list[str]]]:
    """The kinds of `_WORLD`, and the lines of each."""
    for line in text.strip().replace("\n  |", " |").split("\n"):
        if line.endswith(":"):
            lines: list[str] = []
            yield line[:-1], lines
        else:
            lines.append(line)


WORLD: dict[str, tuple[Callable[[Names], str], tuple[Attribute, ...]]] = {
    kind: (getattr(Names, kind), tuple(map(_attribute, lines)))
    for kind, lines in list(_sections(_WORLD))
}
"""How each kind of entity is named, and what may be told of it."""

TOLD = (
    "the {n} of {e} is {v}",
    "{e} has a {n}, which is {v}",
    "as for {e}, the {n} is {v}",
    "the records give the {n} of {e} as {v}",
    "the {n} of {e}, as everyone knows, is {v}",
    "a note says that the {n} of {e} is {v}",
)
ASKED = (
    "{w} is the {n} of {e}?",
    "Tell me the {n} of {e}.",
    "According to the text, {lw} is the {n} of {e}?",
    "{w} is given as the {n} of {e}?",
    "Please find the {n} of {e}.",
)
OPENERS = (
    "it is said that",
    "the clerk wrote that",
    "by all accounts",
    "in those days",
    "it turned out that",
    "the letter adds that",
    "as before,",
    "to nobody's surprise,",
)

TELLINGS = 3  # how often a fact is stated, at most

FILLER = (
    "the weather turned {adj} before the end of the week",
    "the {thing} was left near the {place} and nobody came for it",
    "a {adj} wind blew over the {place} for most of the {time}",
    "the committee met in the {place} and spoke about the {thing} until {time}",
    "some of the older people still remember the {adj} {thing}",
    "nothing in the {place} had changed since the last {time}",
    "the road to the {place} was {adj} and the carts moved slowly",
    "they repaired the {thing}, painted the door and went home",
    "a {adj} visitor asked about the {thing} and then left without a word",
    "every {time} the {place} fills with people who want to see the {thing}",
    "there was a long talk about the price of the {thing}",
    "the children found a {adj} {thing} behind the {place}",
    "no decision was taken, and the {thing} stayed where it was",
    "the {place} is {adj} at this time of the year",
    "after the {time} the {place} was closed for a while",
    "the report on the {thing} was {adj} and rather short",
    "several guests complained about the {adj} {thing}",
    "the night was {adj} and the {place} lay in the dark",
    "a meeting about the {place} was put off until the next {time}",
    "whoever wants to borrow the {thing} should ask in the {place}",
    "the bells rang twice, and then the {place} was quiet again",
    "the new {thing} is more {adj} than the old one",
    "it rained so much that the {place} had to be cleared",
    "the inspector looked at the {thing} and wrote a {adj} note",
)
MENTION = (
    "visitors to {e} often speak of the {adj} {thing}",
    "there is more to say about {e}, but not in this {time}",
    "the {thing} has nothing to do with {e}",
    "a letter about {e} was lost in the {place}",
    "nobody mentioned {e} during the {time}",
)
_SLOTS = ("adj", "thing", "place", "time")


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact: how it is stated, and how it may be asked for."""

    statements: tuple[str, ...]
    questions: tuple[str, ...]
    answer: str


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
        pattern = rng.choice(MENTION)
    else:
        pattern = rng.choice(FILLER)
    slots = {key: rng.choice(WORDS[key]) for key in _SLOTS}
    return _sentence(pattern.format(e=rng.choice(entities) if entities else "", **slots))


def stated(rng: random.Random, entity: str, attribute: Attribute, value: str) -> Fact:
    """The fact that `value` is the `attribute` of `entity`, stated up to `TELLINGS` times."""
    told_as = []
    for pattern in rng.sample(TOLD + attribute.told * 4, rng.randint(1, TELLINGS)):
        text = pattern.format(n=attribute.noun, e=entity, v=value)
        if value[0] in "aeiou":
            text = text.replace(f" a {value}", f" an {value}")
        if rng.random() < 0.25:
            text = f"{rng.choice(OPENERS)} {text}"
        told_as.append(_sentence(text))
    shapes = [
        a.format(w=attribute.who, lw=attribute.who.lower(), n=attribute.noun, e=entity)
        for a in ASKED
    ] + [a.format(e=entity) for a in attribute.asked * 3]
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


def document(rng: random.Random, sentences: int, facts: int) -> Document:
    """A text of `sentences` sentences that states `facts` facts, which must not be more than the
    sentences.

    If there is not room for all statements, each fact is stated once before any is stated again.
    """
    names = Names(rng)
    told, entities = some_facts(rng, names, facts)
    return written(rng, sentences, told, entities)


def written(
    rng: random.Random, sentences: int, facts: Sequence[Fact], entities: list[str]
) -> Document:
    """As `document`, with these facts. entities: are mentioned in sentences without a fact."""
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
