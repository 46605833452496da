"""The result of a task under one policy and budget, as it is shown and written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.eval import intervals
from minikv.cli.eval.files import Item
from minikv.cli.eval.measure import agreement

Answers = Sequence[Sequence[str]]
"""[document][question]."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One task under one policy and budget.

    `score` is the mean over n questions (perplexity for ppl, attention lost for loss; n tokens),
    with its 95 % interval over documents, None of a single one; `by_question` by the question's
    number in its chat, `by_place` by needle depth and length; `held` the share of a
    full cache that is held at the end (1 less the share saved), mean over documents. `by_item` is
    each document's own mean (nats for ppl), so that policies can be compared in pairs. `reuse` is
    what later questions found; `same_by_question`, of chats, the share of answers that are the full
    cache's. `by_group` is (name, score, n) of the items' own groups; `answers` and their `scores`
    are by document and question. `file`: whose records it is of.
    """

    task: str
    policy: str
    decode: str
    budget: str
    stride: int
    n: int
    score: float
    low: float | None
    high: float | None
    held: float
    by_item: list[float] = field(default_factory=list)
    by_question: list[float] = field(default_factory=list)
    by_place: list[tuple[float, int, float, int]] = field(default_factory=list)
    more: dict[str, float] = field(default_factory=dict)
    reuse: str = "once"
    same_by_question: list[float] = field(default_factory=list)
    by_group: list[tuple[str, float, int]] = field(default_factory=list)
    answers: list[list[str]] = field(default_factory=list)
    scores: list[list[float]] = field(default_factory=list)
    file: str = ""

    @property
    def title(self) -> str:
        """The task, with the file whose records it is of."""
        if self.task == "file":
            return self.file
        return f"{self.task} of {self.file}" if self.file else self.task

    def record(self) -> dict[str, object]:
        """The cell for JSON, which has no infinity."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in (asdict(self) | {"task": self.title}).items()
        }


def answered(
    task: str,
    eviction: EvictionConfig,
    items: Sequence[Item],
    answers: Answers,
    held: Sequence[float],
) -> Cell:
    """Answers scored by the metrics of their items."""
    scores = [
        [item.metric(a, right, item.classes) for a, right in zip(given, item.right, strict=True)]
        for item, given in zip(items, answers, strict=True)
    ]
    places: dict[tuple[float, int], list[float]] = {}
    if task == "needle":
        for item, row in zip(items, scores, strict=True):
            assert item.where is not None
            places.setdefault(item.where, []).extend(row)
    by_place = [(*where, mean(s), len(s)) for where, s in sorted(places.items())]
    groups: dict[str, list[float]] = {}
    for item, row in zip(items, scores, strict=True):
        for group in item.groups:
            groups.setdefault(group, []).extend(row)
    return replace(
        _of_questions(task, eviction, scores, held),
        by_place=by_place,
        by_group=[(name, mean(s), len(s)) for name, s in sorted(groups.items())],
        answers=[list(row) for row in answers],
        scores=scores,
    )


def agreeing(
    eviction: EvictionConfig, answers: Answers, full: Answers, held: Sequence[float]
) -> Cell:
    """Answers compared with the full cache's."""
    pairs = [
        [agreement(a, b) for a, b in zip(mine, theirs, strict=True)]
        for mine, theirs in zip(answers, full, strict=True)
    ]
    flat = [pair for row in pairs for pair in row]
    more = {"rouge_l": mean([pair.rouge_l for pair in flat])}
    if firsts := sorted(pair.first for pair in flat if pair.first is not None):
        more["median_first_difference"] = float(firsts[len(firsts) // 2])
    scores = [[float(pair.exact) for pair in row] for row in pairs]
    made = [list(row) for row in answers]
    return replace(
        _of_questions("agree", eviction, scores, held), more=more, answers=made, scores=scores
    )


def beside(cell: Cell, answers: Answers, full: Answers) -> Cell:
    """The cell of a chat, with a comparison of its answers and the full cache's.

    `more` gets `same`, the share of answers that are the full cache's word for word, with its
    interval, and `all_right`, the share of chats in which every answer is right.
    """
    same = [
        [float(agreement(a, b).exact) for a, b in zip(mine, theirs, strict=True)]
        for mine, theirs in zip(answers, full, strict=True)
    ]
    low, high = intervals.of_shares(same)
    bounds = {} if low is None or high is None else {"same_low": low, "same_high": high}
    more = {
        "same": mean([x for row in same for x in row]),
        **bounds,
        "all_right": mean([float(score == 1.0) for score in cell.by_item]),
    }
    return replace(cell, more={**cell.more, **more}, same_by_question=_columns(same))


def measured(
    task: str, eviction: EvictionConfig, values: intervals.Rows, held: Sequence[float]
) -> Cell:
    """Mean over tokens and interval over documents; perplexity is the exponential of both."""
    made = _cell(task, eviction, values, intervals.of_means(values), held)
    if task != "ppl":
        return made
    low, high = (None if x is None else _exp(x) for x in (made.low, made.high))
    return replace(made, score=_exp(made.score), low=low, high=high)


def mean(values: Sequence[float]) -> float:
    """0 of none."""
    return sum(values) / len(values) if values else 0.0


def _of_questions(
    task: str, eviction: EvictionConfig, scores: intervals.Rows, held: Sequence[float]
) -> Cell:
    made = _cell(task, eviction, scores, intervals.of_shares(scores), held)
    by_question = _columns(scores)
    return replace(made, by_question=by_question if len(by_question) > 1 else [])


def _columns(rows: intervals.Rows) -> list[float]:
    """The mean of each question over the documents that have so many."""
    longest = max(map(len, rows))
    return [mean([row[i] for row in rows if i < len(row)]) for i in range(longest)]


def _cell(
    task: str,
    eviction: EvictionConfig,
    rows: intervals.Rows,
    bounds: intervals.Bounds,
    held: Sequence[float],
) -> Cell:
    every, (low, high) = [value for row in rows for value in row], bounds
    return Cell(
        task,
        eviction.policy,
        eviction.decode,
        str(eviction.budget) if eviction.evicts else "-",
        eviction.stride,
        len(every),
        mean(every),
        low,
        high,
        mean(held),
        [round(mean(row), 4) for row in rows],
    )


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf
