"""Answers and their scores."""

from __future__ import annotations

import pytest

from minikv.cli.eval import items


@pytest.mark.parametrize(
    ("metric", "answer", "right", "score"),
    [
        (items.exact, " Velgate ", ["Velgate"], 1.0),
        (items.exact, "velgate", ["Velgate"], 0.0),
        (items.exact, "Velgate.", ["Velgate"], 0.0),
        (items.exact, "Velgate and Orlin", ["Velgate"], 0.0),
        (items.exact, "", ["Velgate"], 0.0),
        (items.exact, "Orlin", ["Velgate", "Orlin"], 1.0),
        (items.contains, "It is 12 and 7.", ["12", "8"], 0.5),
        (items.contains_any, "It is 12 and 7.", ["12", "8"], 1.0),
    ],
)
def test_metrics(metric: items.Metric, answer: str, right: list[str], score: float) -> None:
    assert metric(answer, right) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "right", "score"),
    [
        ("White.", ["white"], 1.0),
        ("The favourite colour of Tarin Velvin is **white**.", ["white"], 1.0),
        ("whitewash", ["white"], 0.0),
        ("offwhite", ["white"], 0.0),
        ("off-white", ["white"], 0.0),
        ("white-washed", ["white"], 0.0),
        ("A whitewash, and it is white-ish. White", ["white"], 1.0),
        ("It is white - or was", ["white"], 1.0),
        ("_white_", ["white"], 1.0),
        ("'white'", ["white."], 1.0),
        ("The mayor is Tarin\nVelvin, it says.", ["Tarin Velvin"], 1.0),
        ("Velvin, Tarin", ["Tarin Velvin"], 0.0),
        ("Tarin's", ["Tarin"], 1.0),
        ("blue", ["red", "blue"], 1.0),
        ("117", ["17"], 0.0),
        ("It is 17.", ["17"], 1.0),
        ("17,5 or 3.17 or 12:17", ["17"], 0.0),
        ("1,17,5", ["17"], 0.0),
        ("12, 17, 5", ["17"], 1.0),
        ("Answer:17", ["17"], 1.0),
        # Case and form: sharp s, a composed and a decomposed e, full width, a mark of its own.
        ("Es ist die STRASSE.", ["Straße"], 1.0),
        ("un cafe\u0301.", ["CAF\u00c9"], 1.0),
        ("un cafe\u0301", ["cafe"], 0.0),
        ("x\u0301", ["x"], 0.0),
        ("\uff11\uff17", ["17"], 1.0),
        ("“Велград”, сказал он", ["велград"], 1.0),
        ("Велградский", ["велград"], 0.0),
        ("", ["white"], 0.0),
        (" \n", ["white"], 0.0),
        ("white", [""], 0.0),
        ("It is ...", ["..."], 0.0),
        ("", [""], 0.0),
    ],
)
def test_a_value_is_found_as_whole_words(answer: str, right: list[str], score: float) -> None:
    assert items.contains_words(answer, right) == score
