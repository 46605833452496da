"""A user's own text: parts of it to be continued, or with facts put into it to ask for."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path

from minikv.checks import quoted
from minikv.cli.documents.text import read_file
from minikv.cli.eval.items import Item
from minikv.cli.eval.tasks import DEPTHS, Manner, asking
from minikv.errors import UsageError
from minikv.models.bundled.exam import Codec
from minikv.models.bundled.world import Fact

_CITIES = "Lisbon Bergen Krakow Porto Ghent Turin Malmo Graz Vilnius Tampere Basel Zagreb".split()
_FIRST = "Ottoline Bartholomew Zephyrine Casimir Philippa Thaddeus Marguerite Leopold".split()
_LAST = "Vandermeer Okonkwo-Hale Szczepanski Featherstonehaugh Abernathy Lindqvist Moreau".split()
_WORDS = "marzipan tortoise lantern glacier saffron anvil juniper parachute obsidian kettle".split()
_PLACES = "Port Ellory|Saint Maubrac|Upper Kelvinhead|Lake Tarnowitz|New Quillfordshire".split("|")


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
    """What --needle was given: a sentence, a question and its answer, with | between them."""
    parts = [part.strip() for part in text.split("|")]
    if len(parts) != 3 or not all(parts):
        raise UsageError(
            f"cannot read the needle {quoted(text)}",
            "give 'SENTENCE | QUESTION | ANSWER', as in "
            "'The code of the shed is 48213. | What is the code of the shed? | 48213'",
        )
    sentence, question, answer = parts
    return Fact((sentence,), (question,), answer, "given")


def read_text(path: Path) -> str:
    """A text file, or a document of another kind that the chat reads. Raises UsageError."""
    return read_file(str(path)).text


def parts(codec: Codec, text: str, tokens: int) -> list[list[str]]:
    """The sentences of the parts of a text, each of about `tokens` tokens. A shorter end counts
    only where there is nothing else."""
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
    made = ["".join(part).strip() for part in parts(codec, text, tokens)]
    return [
        Item(part, (), (), source=f"{source}, part {number}")
        for number, part in enumerate(made[:count], 1)
    ]


def facts(
    codec: Codec,
    text: str,
    tokens: int,
    count: int,
    seed: int,
    how: Manner,
    questions: int,
    given: Sequence[Fact] = (),
) -> Iterator[Item]:
    """`count` parts with several facts each, spread evenly. At most `questions` are asked for, each
    as if it were the first."""
    for i, part in enumerate(islice(cycle(parts(codec, text, tokens)), count)):
        rng = random.Random(f"{seed} {i}")
        told = [*given] or made_facts(rng)
        depths = [(2 * j + 1) / (2 * len(told)) for j in range(len(told))]
        asked = rng.sample(told, min(questions, len(told)))
        document = _with(part, [fact.statements[0] for fact in told], depths)
        kinds = {"groups": (asked[0].kind,)} if len(asked) == 1 else {}
        yield asking(document, asked, rng, how, apart=len(asked) > 1, **kinds)


def needle(
    codec: Codec,
    text: str,
    lengths: Sequence[int],
    count: int,
    seed: int,
    how: Manner,
    given: Sequence[Fact] = (),
) -> Iterator[Item]:
    """As `tasks.needle`, in parts of a text."""
    for length in lengths:
        cut = cycle(parts(codec, text, length))
        for depth in DEPTHS:
            for i in range(count):
                rng = random.Random(f"{seed} {length} {depth} {i}")
                fact = rng.choice([*given] or made_facts(rng))
                document = _with(next(cut), fact.statements, [depth])
                yield asking(document, [fact], rng, how, where=(depth, length))


def _with(sentences: Sequence[str], facts: Sequence[str], depths: Sequence[float]) -> str:
    """The text with each fact at its depth, the first first."""
    whole = [*sentences]
    for fact, depth in reversed([*zip(facts, depths, strict=True)]):
        whole.insert(round(depth * len(sentences)), f" {fact}")
    return "".join(whole).strip()
