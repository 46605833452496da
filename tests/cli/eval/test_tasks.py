"""Documents with the facts that are asked for, and the questions of every task."""

from __future__ import annotations

from typing import Any

import pytest
from word_codec import Words

import minikv
from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.eval import names, run, tasks
from minikv.cli.eval.files import Item
from minikv.cli.eval.passes import PASSES
from minikv.cli.eval.tasks import CHATS
from minikv.errors import UsageError
from minikv.models.bundled import world


class Bytes:
    """A codec of one token per character."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def test_needles_lie_where_they_should() -> None:
    items = list(tasks.needle(Bytes(), [2000, 4000], 2, 5))
    assert len(items) == 2 * 5 * 2
    for item in items:
        assert item.where is not None
        depth, length = item.where
        assert abs(len(item.document) - length) < 160
        answer = item.right[0][0]
        at = item.document.index(answer) / len(item.document)
        assert abs(at - depth) < 0.12
        assert item.document.count(answer) == 1 or len(answer) < 4
    assert len({item.document for item in items}) == len(items)


def test_needles_of_different_lengths_are_different() -> None:
    """1000 apart in length, and one apart in number, were the same."""
    items = list(tasks.needle(Bytes(), [1000, 2000], 2, 5, depths=(0.5,)))
    assert len({item.right for item in items}) == 4


@pytest.mark.parametrize("tokens", [200, 2000])
def test_a_small_vocabulary_has_fewer_sentences_and_no_less_of_the_rest(tokens: int) -> None:
    """A sentence has sixty tokens and more, where the bundled tokenizer has twelve."""
    items = list(tasks.facts(Bytes(), tokens, 20, 900_000_000, tasks.TOLD))
    assert len(items) == 20
    for item in items:
        assert abs(len(item.document.encode()) - tokens) <= 16
        assert item.right[0][0] in item.document


def test_a_chat_that_has_no_room_for_its_facts_says_so() -> None:
    with pytest.raises(UsageError, match=r"500 tokens has about \d+ sentences"):
        list(CHATS["codes"].items(Bytes(), 500, 16, 5, tasks.TOLD))
    assert len(list(CHATS["back"].items(Bytes(), 3000, 7, 5, tasks.TOLD))) == 1


def test_several_questions_about_each_document() -> None:
    """Each asked apart, of other facts; the first documents are those of one question each."""
    several = list(tasks.facts(Bytes(), 3000, 4, 5, tasks.TOLD, 3))
    one = list(tasks.facts(Bytes(), 3000, 4, 5, tasks.TOLD))
    assert [i.document for i in several] == [i.document for i in one]
    assert all(i.apart and len(set(i.right)) == 3 for i in several)
    assert not any(i.apart for i in one)
    few = next(tasks.facts(Bytes(), 400, 1, 5, tasks.TOLD, 9))
    assert 1 <= len(few.questions) <= 2


def _two_facts(names: world.Names) -> list[world.Fact]:
    return [tasks.tell(names, "town", "mayor"), tasks.tell(names, "person", "room", value="17")]


def test_every_chosen_fact_is_told_and_the_length_is_as_asked() -> None:
    for tokens in (tasks.ROOMY, 1000):
        told = tasks.fresh(Words(), tokens, 3, _two_facts)
        assert abs(len(told.text.split()) - tokens) <= 16
        assert len(told.chosen) == 2
        assert len(told.others) >= 3
        for fact in (*told.chosen, *told.others):
            assert fact.statements[0] in told.text
            assert fact.answer in fact.statements[0]
        assert told.chosen[1].answer == "17"
    assert tasks.fresh(Words(), 600, 3, _two_facts) == tasks.fresh(Words(), 600, 3, _two_facts)
    assert tasks.fresh(Words(), 600, 3, _two_facts) != tasks.fresh(Words(), 600, 4, _two_facts)


def test_a_fact_is_told_as_the_world_tells_its_own() -> None:
    """Every wording names the entity before the value; both are what was given."""
    told = tasks.fresh(
        Words(), 600, 1, lambda names: [tasks.tell(names, "town", "mayor", "Velmora", "Ivo Kal")]
    )
    for statement in told.chosen[0].statements:
        assert 0 <= statement.index("Velmora") < statement.index("Ivo Kal")
    assert all("Velmora" in question for question in told.chosen[0].questions)


@pytest.mark.parametrize("name", tasks.CHATS)
def test_a_task_has_as_many_questions_as_its_row_says(name: str) -> None:
    task = tasks.CHATS[name]
    items = list(task.items(Words(), task.least + 100, task.questions + 1, 5, tasks.TRAINED))
    assert len(items) == 2
    for item in items:
        # The shortest document of followup has fewer facts than questions.
        assert len(item.questions) == len(item.right) <= task.questions
        assert len(item.questions) == task.questions or name == "followup"
        assert all(item.metric(" ".join(right), right, ()) == 1.0 for right in item.right[:1])
    assert name in names.TASKS


@pytest.mark.parametrize("name", tasks.CHATS)
def test_the_shortest_document_is_made(name: str) -> None:
    task = tasks.CHATS[name]
    assert len(list(task.items(Words(), task.least, 1, 5, tasks.TRAINED))) == 1


def test_later_questions_go_back_to_the_first() -> None:
    for item in tasks.back(Words(), 600, 4, 5):
        first, _, born, _, export, again, answer = item.questions
        mayor = item.right[0][0]
        assert item.right[5] == item.right[6] == (mayor,)
        assert mayor in born, "asks about what the first answer names"
        assert mayor not in first + again + answer
        assert first != again
        words = [{*question.rstrip("?.").split()} for question in (first, export, again)]
        town = {word for word in set.intersection(*words) if word[0].isupper()}
        assert len(town - {"What", "Who", "Tell", "Please", "According"}) == 1
        assert item.right[2][0] in item.document
        assert item.right[4][0] in item.document


def test_the_codes_of_a_chat_are_64_digits() -> None:
    for item in tasks.codes(Words(), 600, 3, 5):
        assert len("".join(right[0] for right in item.right)) == 64
        assert all(right[0] in item.document for right in item.right)
        assert len(set(item.questions)) == 16


def test_all_questions_stand_in_the_first_message_and_the_first_to_be_answered_is_last() -> None:
    for item in tasks.interview(Words(), 900, 3, 5):
        assert item.at_once
        assert len(item.questions) == len(item.right) == tasks.QUESTIONS
        assert item.opening == " ".join((*item.questions[1:], item.questions[0]))
    assert Item("text", ("a?", "b?"), ((), ())).opening == "a?"


def test_the_bundled_model_answers_all_in_one_answer() -> None:
    """With the full cache. Everything after the prompt is fed one by one, as an answer is: the
    cache read one prompt."""
    chat = minikv.load(policy="full")
    item = next(tasks.interview(chat.tokenizer, 900, 1, 900_000_000))
    one = run.Run(chat, ["interview"], [item], [EvictionConfig.read("full", "none")])
    begun: list[int] = []
    kv = chat.engine.kv
    begin = kv.begin

    def counted(tokens: int, *how: Any, **named: Any) -> None:
        begun.append(tokens)
        begin(tokens, *how, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(kv), "begin", lambda _, *a, **k: counted(*a, **k))
        one.measure(lambda done, total: None)
    assert one.answers()[0] == [[right[0] for right in item.right]]
    assert begun == [PASSES["answers"].reads(chat, item)]


def test_no_answer_begins_with_the_rest_of_the_one_before() -> None:
    """One that was cut at `max_tokens`: its last token is fed before the next question."""
    chat = minikv.load(policy="full")
    made = next(tasks.interview(chat.tokenizer, 900, 1, 900_000_000))
    cut = Item(made.document, made.questions, made.right, max_tokens=1, at_once=True)
    given = PASSES["answers"].run(chat, cut)
    assert all(answer for answer in given)
    assert all(r[0].startswith(a.strip()) for a, r in zip(given, made.right, strict=True))


def test_it_needs_the_positions_that_it_takes() -> None:
    chat = minikv.load(policy="full")
    item = next(tasks.interview(chat.tokenizer, 900, 1, 900_000_000))
    reads, needed = (f(chat, item) for f in (PASSES["answers"].reads, PASSES["answers"].needs))
    PASSES["answers"].run(chat, item)
    assert reads < chat.engine.kv.position <= needed


@pytest.mark.parametrize("make", [tasks.lists, tasks.passage])
def test_answers_have_4_to_64_tokens_and_stand_in_the_document_once(
    make: tasks.Make,
) -> None:
    codec = Words()
    items = list(make(codec, 1000, len(tasks.TOKENS), 5))
    for least, item in zip(tasks.TOKENS, items, strict=True):
        ((value,),) = item.right
        assert least <= len(codec.encode(value)) < least + 24
        assert item.document.count(value) == 1
        assert len(codec.encode(value)) <= item.max_tokens
        assert item.metric(value, (value,), ()) == 1.0
        assert item.metric(value[:-1], (value,), ()) == 0.0


def test_of_a_list_another_model_is_scored_by_the_names_it_lists() -> None:
    item = list(tasks.lists(Words(), 1000, 3, 5, tasks.TOLD))[-1]
    (names,) = item.right
    assert len(names) > 2
    assert item.metric(f"They are {names[0]} and {names[1]}.", names, ()) == 2 / len(names)
    assert item.questions[0].endswith("word for word.")
