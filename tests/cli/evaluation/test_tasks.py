"""Where needles lie, and how many questions a document has."""

from __future__ import annotations

import pytest

from minikv.cli.evaluation import tasks
from minikv.cli.evaluation.chats import CHATS
from minikv.errors import UsageError


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
