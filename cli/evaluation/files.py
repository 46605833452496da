"""Questions from files: LongBench and RULER JSONL, as their projects publish them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from minikv.cli.evaluation import metrics
from minikv.cli.evaluation.metrics import Metric
from minikv.errors import UsageError


@dataclass(frozen=True, slots=True)
class Item:
    """One document and its questions, asked in one chat in this order.

    `right[i]` are the right answers to question i; `where` places the item on a map, as
    (depth, length) for needles; `first_line`: only the first line of an answer counts.
    """

    document: str
    questions: tuple[str, ...]
    right: tuple[tuple[str, ...], ...]
    metric: Metric = metrics.exact
    classes: tuple[str, ...] = ()
    max_tokens: int = 32
    where: tuple[float, int] | None = None
    first_line: bool = False
    task: str = ""


# What a task is asked for where its records have no question of their own.
_ASK = {
    "gov_report": "Summarise the report.",
    "multi_news": "Summarise the news.",
    "lcc": "What is the next line of the code?",
    "passage_count": "How many different paragraphs are there? Answer with the number.",
}
_LONG = {"gov_report": 512, "qmsum": 512, "multi_news": 512, "samsum": 128, "qasper": 128}


def read_items(path: Path) -> Iterator[Item]:
    """The items of a LongBench or RULER file. Raises UsageError that names the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}", "give a JSONL file") from None
    found = False
    for number, line in enumerate(lines, 1):
        if line.strip():
            found = True
            yield _item(path, number, line)
    if not found:
        raise UsageError(f"{path} is empty", "give a JSONL file with one record per line")


def _item(path: Path, number: int, line: str) -> Item:
    def wrong(what: str) -> UsageError:
        return UsageError(
            f"{path}, line {number}: {what}",
            "LongBench records have context, input, answers, dataset; RULER's input and outputs",
        )

    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise wrong(f"not JSON ({error.msg})") from None
    if not isinstance(record, dict):
        raise wrong("not a JSON object")

    def text(name: str) -> str:
        value = record.get(name)
        if not isinstance(value, str):
            raise wrong(f"no {name}" if name not in record else f"{name} is not a text")
        return value

    def texts(name: str) -> tuple[str, ...]:
        value = record.get(name)
        if name not in record:
            raise wrong(f"no {name}")
        if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
            raise wrong(f"{name} is not a list of texts")
        return tuple(value)

    if "context" not in record and "outputs" in record:
        return _ruler(path, text("input"), texts("outputs"), wrong)
    dataset = text("dataset")
    metric = metrics.LONGBENCH.get(dataset)
    if metric is None:
        known = ", ".join(metrics.LONGBENCH)
        raise wrong(f"dataset {dataset!r} is not supported (supported: {known})")
    right = texts("answers")
    if not right:
        raise wrong("answers is empty")
    question = text("input").strip() or _ASK.get(dataset, "")
    if not question:
        raise wrong("input is empty")
    classes = texts("all_classes") if record.get("all_classes") else ()
    return Item(
        text("context"), (question,), (right,), metric, classes, _LONG.get(dataset, 64),
        first_line=dataset in metrics.FIRST_LINE, task=dataset,
    )  # fmt: skip


def _ruler(
    path: Path, prompt: str, right: tuple[str, ...], wrong: Callable[[str], UsageError]
) -> Item:
    """RULER gives the whole prompt; its last line is the question."""
    if not right:
        raise wrong("outputs is empty")
    document, _, question = prompt.rstrip().rpartition("\n")
    if not document.strip():
        raise wrong("input has no document before its last line")
    any_of = "qa" in path.stem or "qa" in path.parent.name
    metric = metrics.contains_any if any_of else metrics.contains
    return Item(document, (question,), (right,), metric, max_tokens=128, task="ruler")
