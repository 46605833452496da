"""Documents with the facts that are asked for, and the questions of every task."""

from __future__ import annotations

import random
import re
from hashlib import sha256
from pathlib import Path

import pytest
from refusals import refused

from minikv.cli.eval import tasks
from minikv.cli.eval.items import TASKS, Item, contains_words
from minikv.cli.eval.tasks import CHATS, DEPTHS, TOLD
from minikv.models import BUNDLED
from minikv.models.bundled import world


class Bytes:
    """A codec of one token per character."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


class Blanks:
    """A codec that has every word in one token, as large vocabularies nearly do."""

    def encode(self, text: str) -> list[int]:
        return [0] * len(text.split())


def made(how: tasks.Manner) -> list[Item]:
    """Of facts, follow-ups and needles."""
    return [
        *tasks.facts(Blanks(), 400, 6, 900_000_000, how),
        *CHATS["followup"].items(Blanks(), 600, 18, 900_000_000, how),
        *tasks.needle(Blanks(), [300, 500], 1, 900_000_000, how=how),
    ]


def test_the_bundled_model_is_asked_as_it_always_was() -> None:
    """The digest is of the items before there were manners. Another model is asked the same of the
    same documents, with an instruction."""
    items, others = made(tasks.TRAINED), made(TOLD)
    told = [(i.document, i.questions, i.right, i.metric.__name__, i.max_tokens) for i in items]
    digest = "57125dbfd08d852044672fbcf0ff9f202d5e58f8857563b72d3bd3e77f376837"
    assert sha256(repr(told).encode()).hexdigest() == digest
    assert [i.document for i in items] == [i.document for i in others]
    for old, new in zip(items[6:], others[6:], strict=True):
        assert new.questions == tuple(f"{q} Answer with the value alone." for q in old.questions)
        assert (new.right, new.groups) == (old.right, old.groups)
    assert {(i.metric, i.max_tokens) for i in others} == {(contains_words, 48)}
    # Words of one token are most of what another tokenizer could be asked for.
    long = [i.right[0][0] for i in tasks.facts(Blanks(), 1000, 12, 5)]
    every = [i.right[0][0] for i in tasks.facts(Blanks(), 1000, 12, 5, TOLD)]
    assert all(" " in answer for answer in long)
    assert sum(" " not in answer for answer in every) > 6


def test_the_bundled_model_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(BUNDLED)
    (tmp_path / "bundled").mkdir()
    monkeypatch.chdir(tmp_path)
    trained = [tasks.manner(name) is tasks.TRAINED for name in (None, str(BUNDLED), "link")]
    told = [tasks.manner(name) is TOLD for name in ("bundled", "owner/name")]
    assert all(trained + told)


MAT = tasks.given_fact("The key is under the mat. | Where is the key? | under the mat")
TEXT = " ".join(f"Sentence {i} of this text says little about item {i}." for i in range(900))


@pytest.mark.parametrize("hay", [None, tasks.Haystack(TEXT, [MAT])])
def test_needles_lie_where_they_should(hay: tasks.Haystack | None) -> None:
    """In a made text, and in parts of a given one."""
    items = list(tasks.needle(Bytes(), [2000, 4000], 2, 5, how=TOLD, hay=hay))
    assert len(items) == len({item.document for item in items}) == 2 * len(DEPTHS) * 2
    for item in items:
        depth, length = item.groups
        assert abs(len(item.document) - int(length[3:].replace(",", ""))) < 160
        answer = item.right[0][0]
        at = item.document.index(answer) / len(item.document)
        assert abs(at - int(depth[3:-1]) / 100) < 0.12
        assert item.document.count(answer) == 1 or len(answer) < 4
        assert hay is None or item.questions[0].startswith("Where is the key?")
    # 1000 apart in length, and one apart in number, were the same once.
    assert len({i.right for i in tasks.needle(Bytes(), [1000, 2000], 2, 5, depths=(0.5,))}) == 4


@pytest.mark.parametrize("tokens", [200, 2000])
def test_a_small_vocabulary_has_fewer_sentences_and_no_less_of_the_rest(tokens: int) -> None:
    """A sentence has sixty tokens and more, where the bundled tokenizer has twelve."""
    items = list(tasks.facts(Bytes(), tokens, 20, 900_000_000, TOLD))
    assert len(items) == 20
    for item in items:
        assert abs(len(item.document.encode()) - tokens) <= 16
        assert item.right[0][0] in item.document


def test_several_questions_about_each_document() -> None:
    """Each asked apart, of other facts; the first documents are those of one question each."""
    several = list(tasks.facts(Bytes(), 3000, 4, 5, TOLD, 3))
    one = list(tasks.facts(Bytes(), 3000, 4, 5, TOLD))
    assert [i.document for i in several] == [i.document for i in one]
    assert all(i.apart and len(set(i.right)) == 3 for i in several)
    assert not any(i.apart for i in one)
    few = next(tasks.facts(Bytes(), 400, 1, 5, TOLD, 9))
    assert 1 <= len(few.questions) <= 2


@pytest.mark.parametrize("name", CHATS)
def test_a_task_has_as_many_questions_as_its_row_says(name: str) -> None:
    task = CHATS[name]
    assert name in TASKS
    assert len(list(task.items(Blanks(), task.least, 1, 5))) == 1, "the shortest document"
    items = list(task.items(Blanks(), task.least + 100, task.questions + 1, 5))
    assert len(items) == 2
    for item in items:  # the shortest document of followup has fewer facts than questions
        assert len(item.questions) == len(item.right) <= task.questions
        assert len(item.questions) == task.questions or name == "followup"
        assert all(item.metric(right[0], right) == 1.0 for right in item.right)


def test_long_answers_are_of_every_kind_in_turn() -> None:
    """Values of many tokens, told to the letter, of which the document has two of the kind."""
    items = list(CHATS["long"].items(Blanks(), 1000, 2 * len(world.LONG), 5))
    assert [i.groups for i in items] == [(kind,) for kind in world.LONG] * 2
    for item in items:
        ((value,),) = item.right
        assert f"{value}." in item.document
        assert len(Blanks().encode(value)) <= item.max_tokens
        assert item.metric(value[:-1], (value,)) == 0.0
    (other,) = CHATS["long"].items(Blanks(), 1000, 1, 5, TOLD)
    assert other.questions[0].endswith("word for word.")


# -- a user's own text ---------------------------------------------------------------------
HAY = tasks.Haystack(TEXT)


def test_the_parts_are_the_text() -> None:
    """In order, cut between sentences, each about as long as asked; a short end is left out."""
    found = tasks.parts(Blanks(), TEXT, 400)
    whole = "".join("".join(part) for part in found)
    assert TEXT.startswith(whole)
    sizes = [len(Blanks().encode("".join(part))) for part in found]
    assert all(380 <= size <= 400 for size in sizes)
    assert len(TEXT.split()) - 400 < sum(sizes)
    assert tasks.parts(Blanks(), "Too short. For that.", 400) == [["Too short.", " For that."]]
    items = tasks.texts(Blanks(), TEXT, 400, 3, "x.txt")
    assert [i.source for i in items] == [f"x.txt, part {n}" for n in (1, 2, 3)]
    assert not any(i.questions or "\n" in i.document for i in items)


def test_facts_are_between_sentences_and_every_one_is_asked_apart() -> None:
    """Four of different kinds, the code with five digits; more documents than parts have others."""
    items = list(tasks.facts(Blanks(), 400, 20, 5, TOLD, 4, HAY))
    assert len({i.document for i in items}) == 20
    for item in items:
        assert item.apart
        for question, (value,) in zip(item.questions, item.right, strict=True):
            assert item.document.count(value) == 1
            noun = re.sub(r"^(What|Who) is (the .*)\? .*", r"\2", question)
            assert f"T{noun[1:]} is {value}." in item.document
            assert contains_words(f"It is {value}.", (value,)) == 1.0
        rest = item.document
        for fact in re.findall(r" The (?:access|secret|head|meeting)[^.]*\.", rest):
            rest = rest.replace(fact, "")
        assert rest in TEXT
    made = [tasks.made_facts(random.Random(seed)) for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]
    one = list(tasks.facts(Blanks(), 400, 20, 5, TOLD, 1, HAY))
    assert {i.groups for i in one} == {("code",), ("word",), ("name",), ("place",)}
    assert {len(i.questions) for i in one} == {1}

    for text in ("", "a | b", "a | b |", "a | b | c | d"):  # a needle has three parts
        refused("cannot read the needle", tasks.given_fact, text)
