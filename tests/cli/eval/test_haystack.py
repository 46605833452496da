"""A user's own text: its parts, and facts in it."""

from __future__ import annotations

import random
import re

import pytest
from word_codec import Words

from minikv.cli.eval import haystack, metrics
from minikv.cli.eval.tasks import DEPTHS, TOLD
from minikv.errors import UsageError

TEXT = " ".join(f"Sentence {i} of this text says little about item {i}." for i in range(300))


def test_the_parts_are_the_text() -> None:
    """In order, cut between sentences, each about as long as asked; a short end is left out."""
    found = haystack.parts(Words(), TEXT, 400)
    whole = "".join("".join(part) for part in found)
    assert TEXT.startswith(whole)
    sizes = [len(Words().encode("".join(part))) for part in found]
    assert all(380 <= size <= 400 for size in sizes)
    assert len(TEXT.split()) - 400 < sum(sizes)
    assert haystack.parts(Words(), "Too short. For that.", 400) == [["Too short.", " For that."]]
    items = haystack.texts(Words(), TEXT, 400, 3, "x.txt")
    assert [i.source for i in items] == [f"x.txt, part {n}" for n in (1, 2, 3)]
    assert not any(i.questions or "\n" in i.document for i in items)


def test_facts_are_between_sentences_and_every_one_is_asked_apart() -> None:
    """Four of different kinds, the code with five digits; more documents than parts have others."""
    items = list(haystack.facts(Words(), TEXT, 400, 20, 5, TOLD, 4))
    assert len({i.document for i in items}) == 20
    for item in items:
        assert item.apart
        for question, (value,) in zip(item.questions, item.right, strict=True):
            assert item.document.count(value) == 1
            noun = re.sub(r"^(What|Who) is (the .*)\? .*", r"\2", question)
            assert f"T{noun[1:]} is {value}." in item.document
            assert metrics.contains_words(f"It is {value}.", (value,)) == 1.0
        rest = item.document
        for fact in re.findall(r" The (?:access|secret|head|meeting)[^.]*\.", rest):
            rest = rest.replace(fact, "")
        assert rest in TEXT
    one = list(haystack.facts(Words(), TEXT, 400, 20, 5, TOLD, 1))
    assert {i.groups for i in one} == {("code",), ("word",), ("name",), ("place",)}
    assert {len(i.questions) for i in one} == {1}


def test_a_given_needle_is_at_its_depth() -> None:
    given = [haystack.given_fact("The key is under the mat. | Where is the key? | under the mat")]
    items = list(haystack.needle(Words(), TEXT, [200, 400], 2, 5, TOLD, given))
    assert len(items) == 2 * len(DEPTHS) * 2
    for item in items:
        assert item.where is not None
        at = item.document.index("The key is under the mat.") / len(item.document)
        assert abs(at - item.where[0]) < 0.08
        assert item.questions[0].startswith("Where is the key?")
        assert item.right == (("under the mat",),)


@pytest.mark.parametrize("text", ["", "a | b", "a | b |", "a | b | c | d"])
def test_a_needle_has_three_parts(text: str) -> None:
    with pytest.raises(UsageError, match="cannot read the needle"):
        haystack.given_fact(text)


def test_made_facts_are_as_the_seed_says() -> None:
    made = [haystack.made_facts(random.Random(seed)) for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]
