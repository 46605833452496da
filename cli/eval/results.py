"""The result of a task under one policy and budget, and tables of results."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.eval.items import ANSWERED, Item
from minikv.cli.screen import text

Rows = Sequence[Sequence[float]]
"""Numbers by document."""
Bounds = tuple[float, float] | tuple[None, None]
"""Low and high; None with fewer than two documents, or without numbers."""
Against = tuple[float, float | None, float | None]
"""A mean or a mean difference, and the ends of its interval."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One task under one policy and budget.

    score: the mean over n questions (perplexity for ppl, nats for kl; n tokens), with its 95 %
    interval over documents (None for a single one). against: the difference from the full cache, in
    pairs (ppl: nats). by_group: (name, score, n) by the items' own groups and, in a chat, by the
    number of the question. until: for agree, the mean number of tokens before the first that
    differs. held: the share of a full cache that is held at the end, mean over documents. by_item:
    each document's own mean (nats for ppl), so that policies can be compared in pairs. reuse: what
    later questions are answered from. answers and scores: by document and question. file: the file
    of the records.
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
    against: Against | None = None
    reuse: str = "once"
    until: float | None = None
    by_item: list[float] = field(default_factory=list)
    by_group: list[tuple[str, float, int]] = field(default_factory=list)
    answers: list[list[str]] = field(default_factory=list)
    scores: list[list[float]] = field(default_factory=list)
    file: str = ""

    @property
    def title(self) -> str:
        """The task, with the file of its records."""
        if self.task == "answers":
            return self.file
        return f"{self.task} of {self.file}" if self.file else self.task

    @property
    def evicts(self) -> bool:
        """Whether this is not the full cache."""
        return self.budget != "-"

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
    """The cell for the results `made` of each item, compared with those of the `full` cache.

    Perplexities of fewer than five documents have no interval, because it would be unreliable.
    """
    more: dict[str, Any] = {}
    if task == "agree":
        answers = [[[t[2] for t in q] for q in row] for row in made]
        rows = [[float(same) for q in row for same in q] for row in answers]
        if items[0].questions:
            rows = [[float(all(q)) for q in row] for row in answers]
            firsts = [q.index(False) if False in q else len(q) for row in answers for q in row]
            more = {"until": mean(firsts)}
    elif task in ("ppl", "kl"):
        rows, whole = (_nats(task, x) for x in (made, full))
        more = {"against": _against(rows, whole, of_means)} if task == "ppl" else {}
    else:
        rows, whole = (_scored(items, x) for x in (made, full))
        against = _against(rows, whole, of_differences)
        answers = [list(row) for row in made]
        more = {"against": against, "answers": answers, "scores": rows}
        more["by_group"] = _grouped(items, rows)
    score = mean([value for row in rows for value in row])
    low, high = (of_means if task in ("ppl", "kl") else of_shares)(rows)
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
        reuse=reuse,
        by_item=[round(mean(row), 4) for row in rows],
        file=file,
        **more,
    )


def _nats(task: str, made: Sequence[Sequence[Any]]) -> list[list[float]]:
    """The nats of each token, by document."""
    which = ("ppl", "kl").index(task)
    return [[t[which] for q in row for t in q] for row in made]


def _scored(items: Sequence[Item], made: Sequence[Sequence[str]]) -> list[list[float]]:
    """The scores of answers, by document."""
    return [
        [item.metric(answer, right) for answer, right in zip(answers, item.right, strict=True)]
        for item, answers in zip(items, made, strict=True)
    ]


def _against(rows: Rows, full: Rows, interval: Callable[[Rows], Bounds]) -> Against:
    """The difference from the full cache, in pairs, with its interval over documents."""
    less = [[a - b for a, b in zip(*both, strict=True)] for both in zip(rows, full, strict=True)]
    return (mean([x for row in less for x in row]), *interval(less))


def mean(values: Sequence[float]) -> float:
    """The mean; 0 for no values."""
    return sum(values) / len(values) if values else 0.0


def _grouped(items: Sequence[Item], rows: Rows) -> list[tuple[str, float, int]]:
    """(group, mean, number of scores), sorted: numbers in names as numbers."""
    found: dict[str, list[float]] = defaultdict(list)
    for item, row in zip(items, rows, strict=True):
        in_turn = len(row) > 1 and not item.apart
        for i, score in enumerate(row, 1):
            for name in (*item.groups, *([f"Q{i}"] if in_turn else [])):
                found[name].append(score)

    def key(name: str) -> list[str | int]:
        parts = re.split(r"(\d+)", name.replace(",", ""))
        return [int(part) if part.isdigit() else part for part in parts]

    return [(name, mean(found[name]), len(found[name])) for name in sorted(found, key=key)]


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


# -- intervals ------------------------------------------------------------------------------------

_Z = 1.96
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def wilson(score: float, n: float) -> tuple[float, float]:
    """Wilson's interval for a mean of n independent scores in 0 to 1. It was derived for shares,
    that is, for scores of 0 or 1."""
    if n == 0:
        return 0.0, 1.0
    middle = (score + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z * math.sqrt(score * (1 - score) / n + (_Z / (2 * n)) ** 2) / (1 + _Z**2 / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def of_shares(rows: Rows) -> Bounds:
    """The interval of a mean of scores in 0 to 1: Wilson's, if every document has one question.

    With more questions, Wilson's n is the effective number of questions, which is the number of
    independent ones with the same error (Korn and Graubard, Survey Methodology 24, 1998), at most
    the real number. If all scores are 0 or all are 1, it is one per document, because such scores
    do not show how similar those of a document are. For few documents it is multiplied by (1.96 /
    t)^2.
    """
    n = sum(map(len, rows))
    if len(rows) < 2 or not n:
        return None, None
    mean, error = _ratio(rows)
    if n == len(rows):
        return wilson(mean, n)
    variance = mean * (1 - mean)
    effective = min(n, variance / error**2) if error else n
    return wilson(mean, (effective if variance > 0 else len(rows)) * (_Z / _student(rows)) ** 2)


def of_means(rows: Rows) -> Bounds:
    """The interval of a mean of any numbers, such as the nats of tokens."""
    if len(rows) < 2 or not any(rows):
        return None, None
    mean, error = _ratio(rows)
    half = _student(rows) * error
    return mean - half, mean + half


def of_differences(rows: Rows) -> Bounds:
    """The interval of a mean of differences of scores in 0 to 1: Tango's, if every document has one
    that is -1, 0 or 1."""
    flat = [value for row in rows for value in row]
    if len(flat) == len(rows) > 1 and set(flat) <= {-1.0, 0.0, 1.0}:
        return tango(flat.count(1.0), flat.count(-1.0), len(flat))
    low, high = of_means(rows)
    return (None, None) if low is None or high is None else (max(-1.0, low), min(1.0, high))


def tango(more: int, less: int, n: int) -> tuple[float, float]:
    """The score interval for the difference of two paired shares (Tango, Statistics in Medicine 17,
    1998): `more` and `less` of n pairs differ, up and down."""
    return -_upper(less, more, n), _upper(more, less, n)


def _upper(more: int, less: int, n: int) -> float:
    low, high = (more - less) / n, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        b = (2 * n - more + less) * middle - more - less
        c = -less * middle * (1 - middle)
        down = (math.sqrt(max(0.0, b * b - 8 * n * c)) - b) / (4 * n)  # likeliest share of `less`
        variance = n * (2 * down + middle * (1 - middle))
        if (n * middle - more + less) ** 2 < 1.96**2 * variance:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _ratio(rows: Rows) -> tuple[float, float]:
    """The mean over all numbers, and its standard error."""
    n, documents = sum(map(len, rows)), len(rows)
    mean = sum(map(sum, rows)) / n
    apart = sum((sum(row) - mean * len(row)) ** 2 for row in rows)
    return mean, math.sqrt(documents / (documents - 1) * apart) / n


def _student(rows: Rows) -> float:
    """The 97.5 % quantile of Student's t, with one degree of freedom less than the number of
    documents. Beyond the table, from a series with an error below 0.001."""
    freedom = len(rows) - 1
    if freedom <= len(_T):
        return _T[freedom - 1]
    return _Z + 2.372 / freedom + 2.823 / freedom**2 + 2.556 / freedom**3


# -- tables ---------------------------------------------------------------------------------------

_UNIT = {"ppl": "perplexity", "agree": "same as full", "kl": "KL"}
_HALF = 0.5  # of the questions: if the full cache answers fewer, a comparison means nothing
Column = tuple[str, Callable[[Cell], str]]
"""A heading, and the text of a cell below it."""


def table(cells: Sequence[Cell], width: int = 0) -> str:
    """One block per task, the full cache's row first; scores by group below it. width: that of the
    terminal, if it has one."""
    blocks = []
    for title in dict.fromkeys(cell.title for cell in cells):
        mine = [cell for cell in cells if cell.title == title]
        blocks.append("\n".join([title, _grid(mine, _figures(mine), width), *_remarks(mine)]))
        groups = dict.fromkeys(name for cell in mine for name, _, _ in cell.by_group)
        if groups:
            columns = [(name, partial(_of_group, name)) for name in groups]
            blocks.append(_grid(mine, columns, width))
    return "\n\n".join(blocks)


def _grid(cells: Sequence[Cell], columns: Sequence[Column], width: int) -> str:
    """A line for each cell: its name, and the columns."""
    lead: list[Column] = [
        ("policy", lambda c: c.policy + (f" /{c.stride}" if c.stride else "")),
        ("decode", lambda c: c.decode),
        ("budget", lambda c: c.budget),
    ]
    if any(cell.reuse != "once" for cell in cells):
        lead.append(("reuse", lambda c: c.reuse if c.evicts else "-"))
    every = [*lead, *columns]
    lines = [[head for head, _ in every], *([get(c) for _, get in every] for c in cells)]
    return text.grid(lines, "<" * len(lead) + ">" * len(columns), width, len(lead))


def _figures(cells: Sequence[Cell]) -> list[Column]:
    """The columns of figures. A column that not all tasks have is included if any cell has a
    value."""
    task = cells[0].task
    nats = "nats" if task == "ppl" else task
    columns: list[Column] = [
        (f"{_UNIT.get(task, 'score')} (95 %)", lambda c: _figure(task, (c.score, c.low, c.high))),
        ("n", lambda c: str(c.n)),
        ("held", lambda c: f"{c.held:.1%}"),
    ]
    if any(c.against for c in cells):
        head = "nats above full (95 %)" if task == "ppl" else "against full (95 %)"
        columns.append(
            (head, lambda c: _figure(nats, c.against, "+") if c.against and c.evicts else "-")
        )
    if any(c.until is not None for c in cells):
        head = "tokens before difference"
        columns.append((head, lambda c: "-" if c.until is None else f"{c.until:.1f}"))
    return columns


def _of_group(name: str, cell: Cell) -> str:
    return next((f"{score:.1%}" for other, score, _ in cell.by_group if other == name), "-")


def _remarks(cells: Sequence[Cell]) -> Iterator[str]:
    """Remarks for comparing the figures."""
    first = cells[0]
    if first.task in ANSWERED and first.score < _HALF:
        share = f"{first.score:.1%}"
        yield f"The full cache itself has {share}: the comparison means nothing with this model."
    if first.task == "kl":
        yield "KL is in nats a token, from the full cache."


def _figure(task: str, found: Against, sign: str = "") -> str:
    """A figure, and the ends of its interval if it has one."""
    # z: no -0.0 after rounding
    form = (
        f"{sign}z.{4 if task == 'kl' else 3}f" if task in ("ppl", "nats", "kl") else f"{sign}z.1%"
    )
    value, *ends = (None if x is None else format(x, form) for x in found)
    return f"{value} ({ends[0]} to {ends[1]})" if ends[0] else str(value)
