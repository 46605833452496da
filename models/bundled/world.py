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

HEADS = (
    "Vel Tor Mar Bri Kal Dun Hes Lor Fen Gal Ost Ral Sel Tam Ul Wen Yar Zin Cor Dra Eb Fal Gri Hol "
    "Is Jor Kes Lun Mor Nar Ob Pel Quin Ros Stur Tre Und Vas Wil Yev Zor Al Bel Cas Dor Esk Fro "
    "Gar Hal Ing Jas Kor Lam Mil Nor Orm Pra Rud Sten Thal Urs Vin War Xan Yol Zem"
).split()
TOWN_TAILS = (
    "mora dale wick by ton ford stead haven len gate holm mere ness worth bury port field bridge "
    "combe minster thorpe cliff moor water brook"
).split()
SURNAME_TAILS = (
    "vin ske man son rick aldi ova eni bart quist ander olt ezzo ikov hart land strom berg ette "
    "inge osk ulf aric ema"
).split()
FIRST = (
    "Tarin Odile Marek Sanna Ivo Petra Lukas Wanda Anton Greta Felix Nadia Oskar Livia Boris Clara "
    "Henrik Irma Jonas Katya Leon Mira Nils Olga Pavel Rosa Stefan Tilda Viktor Yara Axel Berta "
    "Casper Dora Emil Frida Georg Hanna Igor Judit Karl Lena Milo Nora Otto Paula Ruben Selma "
    "Theo Ulla Vera Willem Xenia Yuri Zoe Aldo Bruna Cyril Delia Edgar Flora Gustav Hilda Ines"
).split()
ADJECTIVES = (
    "Silver Golden Crimson Northern Southern Quiet Brave Wandering Iron Copper Distant Gentle "
    "Bright Hidden Lonely Swift Ancient Merry Frozen Amber Scarlet Western Eastern Humble Proud "
    "Restless Faithful Bold Misty Velvet"
).split()
NOUNS = (
    "Heron Lantern Anchor Falcon Compass Willow Harvest Beacon Raven Thistle Otter Meadow Comet "
    "Swallow Harbour Juniper Badger Horizon Orchard Pelican Sparrow Tempest Marigold Cedar Summit "
    "Ember Dolphin Granite Clover Voyager"
).split()
COLOURS = (
    "red blue green yellow purple orange white black grey brown pink turquoise violet maroon beige"
).split()
ANIMALS = (
    "fox owl bear wolf hare stag swan goat lynx crane toad horse eagle seal mole tiger parrot "
    "rabbit turtle donkey"
).split()
INSTRUMENTS = (
    "violin flute cello piano harp drum trumpet guitar oboe organ clarinet banjo tuba lute"
).split()
TRADES = (
    "baker miller weaver carpenter doctor teacher printer surveyor gardener tailor locksmith "
    "lawyer chemist painter farmer sailor mason librarian engineer potter clockmaker nurse pilot "
    "butcher"
).split()
GOODS = (
    "wool salt timber copper glass honey paper rope cheese linen tea coal silk iron soap leather "
    "grain wine pottery amber oil candles cotton fish apples tin lamps tobacco spices barley"
).split()
FOODS = (
    "soup bread plums rice pancakes beans dumplings herring pie stew noodles walnuts cherries "
    "mushrooms porridge olives"
).split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()
CODEWORDS = (
    "mirror ladder pepper window candle button river needle basket feather hammer pebble ribbon "
    "saddle thunder whistle blanket cabbage engine magnet"
).split()

Draw = Callable[["Names"], str]


class Names:
    """Draws names and values. A part of a name is used again only when its list is exhausted."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._used: set[str] = set()
        self._left: dict[int, list[str]] = {}

    def part(self, words: list[str]) -> str:
        """A word of the list. Each word is used once before any is used twice."""
        left = self._left.get(id(words))
        if not left:
            left = self._left[id(words)] = self.rng.sample(words, len(words))
        return left.pop()

    def fresh(self, make: Callable[[], str]) -> str:
        """The first result of `make` that is new in this document."""
        for _ in range(1000):
            name = make()
            if name not in self._used:
                self._used.add(name)
                return name
        raise ValueError("the world has run out of names for one document")

    def town(self) -> str:
        return self.fresh(lambda: self.part(HEADS) + self.rng.choice(TOWN_TAILS))

    def surname(self) -> str:
        return self.fresh(lambda: self.part(HEADS) + self.rng.choice(SURNAME_TAILS))

    def person(self) -> str:
        return f"{self.part(FIRST)} {self.surname()}"

    def ship(self) -> str:
        return self.fresh(lambda: f"the {self.part(ADJECTIVES)} {self.part(NOUNS)}")

    def firm(self) -> str:
        return f"{self.surname()} {self.rng.choice(('Works', 'Mills', 'Shipping', 'Brothers'))}"

    def project(self) -> str:
        return self.fresh(lambda: f"Project {self.part(ADJECTIVES)} {self.part(NOUNS)}")

    def year(self) -> str:
        return str(self.rng.randint(1710, 1989))

    def code(self) -> str:
        return str(self.rng.randint(1000, 9999))

    def number(self) -> str:
        low, high = (11, 99) if self.rng.random() < 0.5 else (100, 999)
        return str(self.rng.randint(low, high))


def _word(words: list[str]) -> Draw:
    return lambda names: names.rng.choice(words)


@dataclass(frozen=True, slots=True)
class Attribute:
    """One property of a kind of entity.

    noun: fits "the NOUN of X". told: further statements, and asked: further questions, with {e} for
    the entity and {v} for the value.
    """

    noun: str
    who: str
    draw: Draw
    told: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()


WORLD: dict[str, tuple[Callable[[Names], str], tuple[Attribute, ...]]] = {
    "town": (
        Names.town,
        (
            Attribute(
                "mayor",
                "Who",
                Names.person,
                ("the people of {e} elected as mayor {v}",),
                ("Who is mayor in {e}?",),
            ),
            Attribute(
                "founding year",
                "What",
                Names.year,
                ("{e} was founded in {v}",),
                ("When was {e} founded?", "In which year was {e} founded?"),
            ),
            Attribute(
                "main export",
                "What",
                _word(GOODS),
                ("{e} exports mostly {v}",),
                ("What does {e} export?",),
            ),
            Attribute(
                "emblem",
                "What",
                _word(ANIMALS),
                ("on the emblem of {e} stands a {v}",),
                ("Which animal is on the emblem of {e}?",),
            ),
            Attribute(
                "schoolteacher",
                "Who",
                Names.person,
                ("the school of {e} is led by the teacher {v}",),
                ("Who teaches at the school of {e}?",),
            ),
            Attribute(
                "river",
                "What",
                Names.town,
                ("through {e} flows the river {v}",),
                ("Which river flows through {e}?",),
            ),
            Attribute(
                "festival month",
                "What",
                _word(MONTHS),
                ("{e} holds its festival in {v}",),
                ("When does {e} hold its festival?",),
            ),
            Attribute(
                "number of wells",
                "What",
                Names.number,
                ("the wells of {e} number {v}",),
                ("How many wells are in {e}?",),
            ),
        ),
    ),
    "person": (
        Names.person,
        (
            Attribute(
                "trade",
                "What",
                _word(TRADES),
                ("{e} works as a {v}",),
                ("What does {e} work as?", "What does {e} do for a living?"),
            ),
            Attribute(
                "birthplace", "What", Names.town, ("{e} was born in {v}",), ("Where was {e} born?",)
            ),
            Attribute(
                "favourite colour",
                "What",
                _word(COLOURS),
                ("the colour that {e} likes best is {v}",),
                ("Which colour does {e} like best?",),
            ),
            Attribute(
                "instrument",
                "What",
                _word(INSTRUMENTS),
                ("{e} plays the {v}",),
                ("What does {e} play?", "Which instrument does {e} play?"),
            ),
            Attribute(
                "pet",
                "What",
                _word(ANIMALS),
                ("{e} keeps a tame {v}",),
                ("Which animal does {e} keep?",),
            ),
            Attribute(
                "favourite dish",
                "What",
                _word(FOODS),
                ("for supper {e} always orders {v}",),
                ("What does {e} order for supper?",),
            ),
            Attribute(
                "locker code",
                "What",
                Names.code,
                ("the locker of {e} opens with {v}",),
                ("What opens the locker of {e}?",),
            ),
            Attribute(
                "neighbour",
                "Who",
                Names.person,
                ("next door to {e} lives {v}",),
                ("Who lives next door to {e}?",),
            ),
            Attribute(
                "room",
                "What",
                Names.number,
                ("{e} sleeps in room {v}",),
                ("In which room does {e} sleep?",),
            ),
        ),
    ),
    "ship": (
        Names.ship,
        (
            Attribute(
                "captain",
                "Who",
                Names.person,
                ("in command of {e} is {v}",),
                ("Who commands {e}?",),
            ),
            Attribute(
                "home port",
                "What",
                Names.town,
                ("{e} sails from the port of {v}",),
                ("From which port does {e} sail?",),
            ),
            Attribute(
                "cargo", "What", _word(GOODS), ("{e} carries {v}",), ("What does {e} carry?",)
            ),
            Attribute(
                "launch year",
                "What",
                Names.year,
                ("{e} was launched in {v}",),
                ("When was {e} launched?",),
            ),
            Attribute(
                "sail colour",
                "What",
                _word(COLOURS),
                ("the sails of {e} are {v}",),
                ("Which colour are the sails of {e}?",),
            ),
            Attribute(
                "cook",
                "Who",
                Names.person,
                ("the meals on {e} are cooked by {v}",),
                ("Who cooks on {e}?",),
            ),
        ),
    ),
    "firm": (
        Names.firm,
        (
            Attribute(
                "director", "Who", Names.person, ("{e} is directed by {v}",), ("Who directs {e}?",)
            ),
            Attribute(
                "seat",
                "What",
                Names.town,
                ("{e} has its seat in {v}",),
                ("Where does {e} have its seat?",),
            ),
            Attribute(
                "product", "What", _word(GOODS), ("{e} makes {v}",), ("What does {e} make?",)
            ),
            Attribute(
                "number of workers",
                "What",
                Names.number,
                ("the workers of {e} number {v}",),
                ("How many workers does {e} have?",),
            ),
            Attribute(
                "accountant",
                "Who",
                Names.person,
                ("the books of {e} are kept by {v}",),
                ("Who keeps the books of {e}?",),
            ),
        ),
    ),
    "project": (
        Names.project,
        (
            Attribute("leader", "Who", Names.person, ("{e} is led by {v}",), ("Who leads {e}?",)),
            Attribute(
                "code word",
                "What",
                _word(CODEWORDS),
                ("{e} goes by the code word {v}",),
                ("Which code word stands for {e}?",),
            ),
            Attribute(
                "site",
                "What",
                Names.town,
                ("{e} is being built in {v}",),
                ("Where is {e} being built?",),
            ),
            Attribute(
                "budget", "What", Names.code, ("{e} may spend {v}",), ("How much may {e} spend?",)
            ),
            Attribute(
                "start month",
                "What",
                _word(MONTHS),
                ("{e} begins in {v}",),
                ("When does {e} begin?",),
            ),
        ),
    ),
}

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
SLOTS = {
    "adj": (
        "cold warm dry strange heavy narrow pleasant dull bright noisy gentle rough careful broken "
        "simple famous empty modest curious plain"
    ).split(),
    "thing": (
        "wagon clock fence barrel ledger map stove bench bell carpet statue gate parcel wheel mill "
        "boat roof painting kettle tower"
    ).split(),
    "place": (
        "market square harbour garden kitchen chapel station yard library cellar hall valley "
        "meadow forest office street inn warehouse courtyard island"
    ).split(),
    "time": "week month season morning evening winter summer autumn spring year".split(),
}


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
    slots = {key: rng.choice(words) for key, words in SLOTS.items()}
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
