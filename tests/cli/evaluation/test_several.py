"""Three values in one answer."""

from __future__ import annotations

from word_codec import Words

from minikv.cli.evaluation import several, tasks


def test_the_last_question_asks_for_what_the_three_before_asked_for() -> None:
    for item in several.several(Words(), 600, 3, 5):
        *singles, together = item.right
        assert len(singles) == 4
        assert together == tuple(right[0] for right in singles[1:])
        assert all(value in item.document for value in together)
        assert item.questions[-1].startswith("Tell me the ")


def test_the_score_is_the_share_of_the_values() -> None:
    item = next(several.several(Words(), 600, 1, 5))
    values = item.right[-1]
    assert item.metric(f"{values[0]}, {values[2]}", values, ()) == 2 / 3
    assert item.metric(" and ".join(values), values, ()) == 1.0
    assert item.metric("none of them", values, ()) == 0.0


def test_another_model_is_told_that_several_values_are_wanted() -> None:
    item = next(several.several(Words(), 600, 1, 5, tasks.TOLD))
    assert item.questions[0].endswith("the value alone.")
    assert item.questions[-1].endswith("the values alone.")
