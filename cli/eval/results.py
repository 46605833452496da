"""The result of a task under one policy and budget, and tables of results."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.eval import intervals
from minikv.cli.eval.intervals import Rows
from minikv.cli.eval.items import Item
from minikv.cli.eval.names import ANSWERED, CHATS
from minikv.cli.screen import text
from minikv.policies import default_step


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
    rows, more = _rows(task, items, made, full)
    score = mean([value for row in rows for value in row])
    low, high = (intervals.of_means if task in ("ppl", "kl") else intervals.of_shares)(rows)
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
        more |= {"same": mean([x for row in alike for x in row])}
        more |= _bounds("same", intervals.of_shares(alike))
        more["all_right"] = mean([float(mean(row) == 1.0) for row in rows])
        found["same_by_question"] = _columns(alike)
    return rows, found


def _against(rows: Rows, full: Rows, *, shares: bool) -> dict[str, float]:
    """How much more than the full cache, in pairs, with its interval over documents."""
    less = [[a - b for a, b in zip(*both, strict=True)] for both in zip(rows, full, strict=True)]
    found = (intervals.of_differences if shares else intervals.of_means)(less)
    return {"against": mean([x for row in less for x in row]), **_bounds("against", found)}


def _bounds(name: str, found: intervals.Bounds) -> dict[str, float]:
    low, high = found
    return {} if low is None or high is None else {f"{name}_low": low, f"{name}_high": high}


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


# -- tables ---------------------------------------------------------------------------------------

_UNIT = {"ppl": "perplexity", "agree": "same as full", "kl": "KL"}
_MORE = {"tokens_before_difference": "tokens before difference"}
_CHAT = {"same": "same as full", "all_right": "all right"}
"""Further figures, with their headings. Of `agree`: the mean number of tokens up to the first that
differs. Of a chat: the share of answers equal to the full cache's, and the share of chats without a
wrong answer."""
_HALF = 0.5  # of the questions, which the full cache must answer for a comparison to mean something


def names(cells: Sequence[Cell]) -> list[str]:
    """A short name of each cell: its policy and budget. If the decode policy of any cell is not its
    policy's default, names include it. If the reuse of any cell is not "once", names include it."""
    with_decode = any(not c.stride and c.decode != default_step(c.policy) for c in cells)
    reused = any(c.reuse != "once" for c in cells)
    found = []
    for c in cells:
        name = c.policy + (f" /{c.stride}" if c.stride else "")
        if c.budget != "-":
            name += (f" with {c.decode}" if with_decode and not c.stride else "") + f" {c.budget}"
            name += f" {c.reuse}" if reused else ""
        found.append(name)
    return found


def table(cells: Sequence[Cell]) -> str:
    """One block per task, the full cache's row first."""
    blocks = []
    for title in dict.fromkeys(cell.title for cell in cells):
        mine = [cell for cell in cells if cell.title == title]
        blocks.append("\n".join([title, _scores(mine), *_remarks(mine)]))
        for heading, rows in (
            ("by question", [_numbered(c.by_question) for c in mine]),
            ("same as full", [_numbered(c.same_by_question) for c in mine]),
            ("by group", [{f"{name} ({n:,})": s for name, s, n in c.by_group} for c in mine]),
        ):
            if heads := list(dict.fromkeys(head for row in rows for head in row)):
                lines = [
                    [name, *(f"{100 * row[head]:.1f}%" if head in row else "-" for head in heads)]
                    for name, row in zip(names(mine), rows, strict=True)
                ]
                blocks.append(text.grid([[heading, *heads], *lines], "<" + ">" * len(heads)))
    return "\n\n".join(blocks)


def _numbered(shares: Sequence[float]) -> dict[str, float]:
    return {f"Q{i}": share for i, share in enumerate(shares, 1)} if len(shares) > 1 else {}


def _remarks(cells: Sequence[Cell]) -> Iterator[str]:
    """What must be known before the figures are compared."""
    first = cells[0]
    if first.task in ANSWERED and first.score < _HALF:
        share = _figure(first.task, first.score)
        yield f"The full cache itself has {share}: the comparison means nothing with this model."
    if first.task == "kl":
        yield "KL is in nats a token, from the full cache."


def _scores(cells: Sequence[Cell]) -> str:
    """A line for each cell; a column where any of them has a value."""
    task = cells[0].task
    known, nats = {key for c in cells for key in c.more}, "nats" if task == "ppl" else task
    columns: list[tuple[str, Callable[[Cell], str]]] = [
        ("policy", lambda c: c.policy + (f" /{c.stride}" if c.stride else "")),
        ("decode", lambda c: c.decode),
        ("budget", lambda c: c.budget),
    ]
    if any(cell.reuse != "once" for cell in cells):
        columns.append(("reuse", lambda c: c.reuse if c.budget != "-" else "-"))
    left = len(columns)
    columns += [
        (_UNIT.get(task, "score"), lambda c: _figure(task, c.score)),
        ("95 %", lambda c: _interval(task, c.low, c.high)),
    ]
    if "against" in known:
        unit = "nats above full" if task == "ppl" else "against full"
        columns += [
            (unit, lambda c: "-" if c.budget == "-" else _figure(nats, c.more["against"], "+")),
            ("95 %", lambda c: "-" if c.budget == "-" else _bounded(c, nats)),
        ]
    columns += [("n", lambda c: str(c.n)), ("held", lambda c: f"{c.held:.1%}")]
    for key, head in (_MORE | ({} if task == "long" else _CHAT)).items():
        if key in known:
            columns.append((head, lambda c, key=key: _extra(c, key)))  # type: ignore[misc]
    lines = [[head for head, _ in columns], *([get(c) for _, get in columns] for c in cells)]
    return text.grid(lines, "<" * left + ">" * (len(columns) - left))


def _bounded(c: Cell, unit: str) -> str:
    return _interval(unit, c.more.get("against_low"), c.more.get("against_high"), "+")


def _interval(task: str, low: float | None, high: float | None, sign: str = "") -> str:
    if low is None or high is None:
        return "-"
    return f"{_figure(task, low, sign)} to {_figure(task, high, sign)}"


def _figure(task: str, value: float, sign: str = "") -> str:
    # z: no -0.0 after rounding
    if task in ("ppl", "nats", "kl"):
        return f"{value:{sign}z.{4 if task == 'kl' else 3}f}"
    return f"{100 * value:{sign}z.1f}%"


def _extra(cell: Cell, key: str) -> str:
    if key not in cell.more:
        return "-"
    return f"{cell.more[key]:.1f}" if key in _MORE else f"{cell.more[key]:.1%}"
