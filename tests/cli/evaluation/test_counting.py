"""Counting."""

from __future__ import annotations

import re

import pytest
from word_codec import Words

from minikv.cli.evaluation import counting
from minikv.models.bundled import world


@pytest.mark.parametrize("tokens", [600, 3000])
def test_the_document_says_what_is_counted(tokens: int) -> None:
    """By a reading of the text itself: how many people have each trade, however it is told."""
    for item in counting.count(Words(), tokens, 4, 5):
        _, (trade,), number = item.right
        people: dict[str, set[str]] = {}
        for told in world.TRADES:
            who = rf"([A-Z]\w+ [A-Z]\w+)\b[^.]*\b{told}\."
            people[told] = {
                found[1]
                for sentence in re.findall(r"[^.]+\.", item.document)
                if (found := re.search(who, sentence.replace("Project", "")))
                and ("trade" in sentence or "works as" in sentence)
            }
        most = max(people.values(), key=len)
        assert people[trade] == most
        assert number[0] == str(len(most))
        assert sum(len(each) == len(most) for each in people.values()) == 1
        assert trade in item.questions[2]
        assert trade not in item.questions[1]


def test_a_number_may_be_written_as_a_word() -> None:
    for item in counting.count(Words(), 600, 4, 5):
        digits, word = item.right[2]
        assert counting._WORDS[int(digits)] == word
