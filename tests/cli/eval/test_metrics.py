"""Answers and their scores."""

from __future__ import annotations

import pytest

from minikv.cli.eval import metrics


@pytest.mark.parametrize(
    ("metric", "answer", "right", "classes", "score"),
    [
        (metrics.exact, " Velgate ", ["Velgate"], [], 1.0),
        (metrics.exact, "velgate", ["Velgate"], [], 0.0),
        (metrics.exact, "Velgate.", ["Velgate"], [], 0.0),
        (metrics.exact, "Velgate and Orlin", ["Velgate"], [], 0.0),
        (metrics.exact, "Vel", ["Velgate"], [], 0.0),
        (metrics.exact, "", ["Velgate"], [], 0.0),
        (metrics.exact, "Orlin", ["Velgate", "Orlin"], [], 1.0),
        (metrics.contains, "It is 12 and 7.", ["12", "8"], [], 0.5),
        (metrics.contains_any, "It is 12 and 7.", ["12", "8"], [], 1.0),
        (metrics.qa_f1, "The red fox", ["a red wolf", "fox"], [], 2 / 3),
        (metrics.qa_f1, "", ["fox"], [], 0.0),
        (metrics.classification, "Food or Sport", ["Food"], ["Food", "Sport"], 0.5),
        (metrics.classification, "Fast food", ["Fast food"], ["food", "Fast food"], 1.0),
        (metrics.classification, "Weather", ["Food"], ["Food", "Sport"], 0.0),
        # Official: the name after one that is taken out is skipped, and stays.
        (
            metrics.classification,
            "Human group or body",
            ["Human group or body"],
            ["Human", "Human group", "Human group or body"],
            0.5,
        ),
        (metrics.classification, "ab", ["ab"], ["a", "b", "ab"], 0.5),
        (metrics.classification, "ab", ["ab"], ["a", "ab", "b"], 1.0),
        (metrics.classification, "ab or c", ["x", "c"], ["a", "ab", "c"], 1 / 3),
        (metrics.retrieval, "Paragraph 3, or 4", ["Paragraph 3"], [], 0.5),
        (metrics.retrieval, "Paragraph 4", ["Paragraph 3", "Paragraph 4"], [], 1.0),
        (metrics.count, "There are 7.", ["7"], [], 1.0),
        (metrics.count, "7 or 8, so 8", ["7", "8"], [], 2 / 3),
        (metrics.count, "None.", ["7"], [], 0.0),
        (metrics.code, "# comment\nreturn x", ["return x"], [], 1.0),
        (metrics.code, "return y", ["return x"], [], 0.88),
        (metrics.code, "\n    return x\nmore", ["    return x"], [], 1.0),
    ],
)
def test_metrics(
    metric: metrics.Metric, answer: str, right: list[str], classes: list[str], score: float
) -> None:
    assert metric(answer, right, classes) == pytest.approx(score)
