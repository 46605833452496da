"""The result of a task under one policy and budget, as it is shown and written."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.eval import intervals
from minikv.cli.eval.intervals import Rows
from minikv.cli.eval.items import Item
from minikv.cli.eval.names import CHATS


@dataclass(frozen=True, slots=True)
class Cell:
    """One task under one policy and budget.

    `score` is the mean over n questions (perplexity for ppl, nats for kl; n tokens), with its 95 %
    interval over documents, None of a single one; `by_question` by the question's number in its
    chat, `by_place` by needle depth and length, `by_group` by the items' own groups, as (name,
    score, n); `held` the share of a full cache that is held at the end, mean over documents.
    `by_item` is each document's own mean (nats for ppl), so that policies can be
    compared in pairs. `reuse`: what later questions are answered from. `same_by_question`, of
    chats: the share of answers that are the full cache's. `answers` and their `scores` are by
    document and question. `file`: whose records it is of.
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
        if self.task == "answers":
            return self.file
        return f"{self.task} of {self.file}" if self.file else self.task

    def record(self) -> dict[str, object]:
        """The cell for JSON, which has no infinity."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in (asdict(self) | {"task": self.title}).items()
        }


def cell(
    task: str,
    eviction: EvictionConfig,
    reuse: str,
    items: Sequence[Item],
    made: Sequence[Sequence[Any]],
    full: Sequence[Sequence[Any]],
    held: Sequence[float],
    file: str = "",
) -> Cell:
    """The cell of what was `made` of each item, beside what was made with the `full` cache.

    Perplexities of fewer than five documents have no interval: it would be wider than they say.
    """
    numbers = task in ("ppl", "kl")
    rows, more = _rows(task, items, made, full)
    score = mean([value for row in rows for value in row])
    low, high = intervals.of_means(rows) if numbers else intervals.of_shares(rows)
    if task == "ppl":
        score = _exp(score)
        few = len(rows) < 5
        low, high = (None if x is None or few else max(1.0, _exp(x)) for x in (low, high))
    if task == "kl" and low is not None:
        low = max(0.0, low)
    return Cell(
        task,
        eviction.policy,
        eviction.decode,
        str(eviction.budget) if eviction.evicts else "-",
        eviction.stride,
        sum(map(len, rows)),
        score,
        low,
        high,
        mean(held),
        [round(mean(row), 4) for row in rows],
        reuse=reuse,
        file=file,
        **more,
    )


def _rows(
    task: str, items: Sequence[Item], made: Sequence[Any], full: Sequence[Any]
) -> tuple[Rows, dict[str, Any]]:
    """The numbers by document, and what a cell has beside them."""
    if task in ("ppl", "kl"):
        which = ("ppl", "kl").index(task)
        rows, whole = ([[t[which] for q in row for t in q] for row in x] for x in (made, full))
        return rows, {"more": _against(rows, whole, shares=False)} if task == "ppl" else {}
    if task == "agree":
        if not items[0].questions:
            return [[float(t[2]) for q in row for t in q] for row in made], {}
        same = [[[t[2] for t in q] for q in row] for row in made]
        until = [q.index(False) if False in q else len(q) for row in same for q in row]
        more = {"tokens_before_difference": mean(until)}
        return [[float(all(q)) for q in row] for row in same], {"more": more}
    rows, whole = (
        [
            [item.metric(a, right, item.classes) for a, right in zip(row, item.right, strict=True)]
            for item, row in zip(items, answers, strict=True)
        ]
        for answers in (made, full)
    )
    more = _against(rows, whole, shares=True)
    found: dict[str, Any] = {"answers": [list(row) for row in made], "scores": rows, "more": more}
    by_question = _columns(rows)
    if len(by_question) > 1 and not any(item.apart for item in items):
        found["by_question"] = by_question
    found["by_group"] = _grouped(rows, [item.groups for item in items])
    if task == "needle":
        places = _grouped(rows, [[item.where] for item in items])
        found["by_place"] = [(*where, score, n) for where, score, n in places]
    if task in CHATS and len(by_question) > 1:
        alike = [
            [float(a.split() == b.split()) for a, b in zip(*both, strict=True)]
            for both in zip(made, full, strict=True)
        ]
        low, high = intervals.of_shares(alike)
        more |= {} if low is None or high is None else {"same_low": low, "same_high": high}
        more["same"] = mean([x for row in alike for x in row])
        more["all_right"] = mean([float(mean(row) == 1.0) for row in rows])
        found["same_by_question"] = _columns(alike)
    return rows, found


def _against(rows: Rows, full: Rows, *, shares: bool) -> dict[str, float]:
    """How much more than the full cache, in pairs, with its interval over documents."""
    less = [[a - b for a, b in zip(*both, strict=True)] for both in zip(rows, full, strict=True)]
    low, high = (intervals.of_differences if shares else intervals.of_means)(less)
    bounds = {} if low is None or high is None else {"against_low": low, "against_high": high}
    return {"against": mean([x for row in less for x in row]), **bounds}


def mean(values: Sequence[float]) -> float:
    """0 of none."""
    return sum(values) / len(values) if values else 0.0


def _columns(rows: Sequence[Sequence[float]]) -> list[float]:
    """The mean of each question over the documents that have so many."""
    longest = max(map(len, rows))
    return [mean([row[i] for row in rows if i < len(row)]) for i in range(longest)]


def _grouped(
    rows: Sequence[Sequence[float]], groups: Sequence[Iterable[Any]]
) -> list[tuple[Any, float, int]]:
    """(group, mean, number of scores) of each group, sorted; `groups` are those of each row."""
    found: dict[Any, list[float]] = defaultdict(list)
    for row, names in zip(rows, groups, strict=True):
        for name in names:
            found[name].extend(row)
    return [(name, mean(scores), len(scores)) for name, scores in sorted(found.items())]


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf
