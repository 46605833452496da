"""Several answers in one."""

from __future__ import annotations

from typing import Any

import pytest
from word_codec import Words

import minikv
from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.evaluation import run
from minikv.cli.evaluation.files import Item
from minikv.cli.evaluation.interview import QUESTIONS, interview
from minikv.cli.evaluation.passes import PASSES


def test_all_questions_stand_in_the_first_message_and_the_first_to_be_answered_is_last() -> None:
    for item in interview(Words(), 900, 3, 5):
        assert item.at_once
        assert len(item.questions) == len(item.right) == QUESTIONS
        assert item.opening == " ".join((*item.questions[1:], item.questions[0]))
    assert Item("text", ("a?", "b?"), ((), ())).opening == "a?"


def test_the_bundled_model_answers_all_in_one_answer() -> None:
    """With the full cache. Everything after the prompt is fed one by one, as an answer is: the
    cache read one prompt."""
    chat = minikv.load(policy="full")
    item = next(interview(chat.tokenizer, 900, 1, 900_000_000))
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
    made = next(interview(chat.tokenizer, 900, 1, 900_000_000))
    cut = Item(made.document, made.questions, made.right, max_tokens=1, at_once=True)
    given = PASSES["answers"].run(chat, cut)
    assert all(answer for answer in given)
    assert all(r[0].startswith(a.strip()) for a, r in zip(given, made.right, strict=True))


def test_it_needs_the_positions_that_it_takes() -> None:
    chat = minikv.load(policy="full")
    item = next(interview(chat.tokenizer, 900, 1, 900_000_000))
    reads, needed = (f(chat, item) for f in (PASSES["answers"].reads, PASSES["answers"].needs))
    PASSES["answers"].run(chat, item)
    assert reads < chat.engine.kv.position <= needed
