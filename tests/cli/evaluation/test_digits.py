"""Long numbers, in one piece and in sixteen."""

from __future__ import annotations

import itertools

from word_codec import Words

from minikv.cli.evaluation import digits, tasks


def test_a_chat_asks_for_32_and_then_for_64_digits() -> None:
    for item in digits.digits(Words(), 600, 3, 5):
        short, long = (right[0] for right in item.right[1:])
        assert (len(short), len(long)) == (32, 64)
        assert short.isdigit()
        assert long.isdigit()
        assert short in item.document
        assert long in item.document
        assert len(item.questions) == 3
        assert item.max_tokens >= 64, "an answer may have a token for each digit"


def test_the_codes_of_a_chat_are_64_digits() -> None:
    for item in digits.codes(Words(), 600, 3, 5):
        assert len("".join(right[0] for right in item.right)) == 64
        assert all(right[0] in item.document for right in item.right)
        assert len(set(item.questions)) == 16


def test_another_model_is_told_what_is_wanted() -> None:
    made = itertools.chain(
        digits.digits(Words(), 600, 1, 5, tasks.TOLD), digits.codes(Words(), 600, 1, 5, tasks.TOLD)
    )
    for item in made:
        assert all(question.endswith(tasks.TOLD.adds) for question in item.questions)
        assert item.metric is tasks.TOLD.metric
