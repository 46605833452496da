"""Lists of names and passages to copy."""

from __future__ import annotations

import pytest
from word_codec import Words

from minikv.cli.evaluation import long_answers, tasks
from minikv.cli.evaluation.chats import Make


@pytest.mark.parametrize("make", [long_answers.lists, long_answers.passage])
def test_answers_have_4_to_64_tokens_and_stand_in_the_document_once(
    make: Make,
) -> None:
    codec = Words()
    items = list(make(codec, 1000, len(long_answers.TOKENS), 5))
    for least, item in zip(long_answers.TOKENS, items, strict=True):
        ((value,),) = item.right
        assert least <= len(codec.encode(value)) < least + 24
        assert item.document.count(value) == 1
        assert len(codec.encode(value)) <= item.max_tokens
        assert item.metric(value, (value,), ()) == 1.0
        assert item.metric(value[:-1], (value,), ()) == 0.0


def test_another_model_is_scored_by_the_names_it_lists() -> None:
    item = list(long_answers.lists(Words(), 1000, 3, 5, tasks.TOLD))[-1]
    (names,) = item.right
    assert len(names) > 2
    assert item.metric(f"They are {names[0]} and {names[1]}.", names, ()) == 2 / len(names)
    assert item.questions[0].endswith("word for word.")
