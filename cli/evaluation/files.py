"""Questions from files: LongBench and RULER JSONL, as their projects publish them.

Both are asked with the document first and the question last. LongBench's instructions are our own
words (see `longbench`), RULER's stay as they stand in its prompts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from minikv.cli.evaluation import metrics
from minikv.cli.evaluation.longbench import DATASETS
from minikv.cli.evaluation.metrics import Metric
from minikv.errors import UsageError


@dataclass(frozen=True, slots=True)
class Item:
    """One document and its questions, asked in one chat in this order.

    `right[i]` are the right answers to question i; `where` places the item on a map, as
    (depth, length) for needles; `first_line`: only the first line of an answer counts; `source`
    is its file and line.
    """

    document: str
    questions: tuple[str, ...]
    right: tuple[tuple[str, ...], ...]
    metric: Metric = metrics.exact
    classes: tuple[str, ...] = ()
    max_tokens: int = 32
    where: tuple[float, int] | None = None
    first_line: bool = False
    source: str = ""


_RULER = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}  # tokens of an answer
_RULER_NAME = re.compile(r"(?<![a-z0-9])(niah|vt|cwe|fwe|qa[_-]?[12])(?![a-z0-9])")
_RULER_NAMES = "niah_*, vt, cwe, fwe, qa_1, qa_2"


def read_items(path: Path) -> Iterator[Item]:
    """The items of a LongBench or RULER file. Raises UsageError that names the line."""
    try:
        # Not splitlines: JSON texts may hold the other characters that Unicode calls a line's end.
        lines = path.read_bytes().decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}", "give a JSONL file") from None
    found = False
    for number, line in enumerate(lines, 1):
        if line.strip():
            found = True
            yield _item(path, number, line)
    if not found:
        raise UsageError(f"{path} is empty", "give a JSONL file with one record per line")


def scored(items: Iterable[Item]) -> str:
    """The names of the metrics that score these, as a report has them."""
    return ", ".join(dict.fromkeys(item.metric.__name__ for item in items))


def _item(path: Path, number: int, line: str) -> Item:
    source = f"{path}, line {number}"

    def wrong(what: str) -> UsageError:
        return UsageError(
            f"{source}: {what}",
            "LongBench records have context, input, answers, dataset; RULER's input and outputs",
        )

    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise wrong(f"not JSON ({error.msg})") from None
    except (ValueError, RecursionError):
        raise wrong("a number too long or lists too deep to read") from None
    if not isinstance(record, dict):
        raise wrong("not a JSON object")

    def checked(name: str, value: str) -> str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise wrong(f"{name} has a lone surrogate at character {error.start:,}") from None
        return value

    def text(name: str) -> str:
        value = record.get(name)
        if not isinstance(value, str):
            raise wrong(f"no {name}" if name not in record else f"{name} is not a text")
        return checked(name, value)

    def texts(name: str) -> tuple[str, ...]:
        value = record.get(name)
        if name not in record:
            raise wrong(f"no {name}")
        if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
            raise wrong(f"{name} is not a list of texts")
        if not value:
            raise wrong(f"{name} is empty")
        return tuple(checked(name, x) for x in value)

    if "context" not in record and "outputs" in record:
        prefix = text("answer_prefix") if record.get("answer_prefix") is not None else ""
        return _ruler(path, source, text("input"), prefix, texts("outputs"), wrong)
    name = text("dataset")
    dataset = DATASETS.get(name)
    if dataset is None:
        raise wrong(f"dataset {name!r} is not supported (supported: {', '.join(DATASETS)})")
    document, given, right = text("context"), text("input"), texts("answers")
    if not document.strip():
        raise wrong("context is empty")
    if dataset.has_input and not given.strip():
        raise wrong("input is empty")
    classes = texts("all_classes") if dataset.metric is metrics.classification else ()
    if classes and not {*classes} & {*right}:
        raise wrong("none of answers is in all_classes")
    if dataset.metric is metrics.retrieval and not all(map(metrics.PARAGRAPH.search, right)):
        raise wrong("an answer names no paragraph, as in Paragraph 1")
    question = f"{dataset.says}\n\n{given}" if given.strip() else dataset.says
    return Item(
        document,
        (question,),
        (right,),
        dataset.metric,
        classes,
        dataset.max_tokens,
        first_line=dataset.first_line,
        source=source,
    )


def _ruler(
    path: Path,
    source: str,
    prompt: str,
    prefix: str,
    right: tuple[str, ...],
    wrong: Callable[[str], UsageError],
) -> Item:
    """RULER gives the whole prompt; its last line is the question. How the answer begins ends the
    prompt in older records and stands alone in newer ones; it is put back where it was.

    RULER opens a chat model's own turn with it; here it closes the user's. The file or, as its own
    scripts write it, the folder says the task.
    """
    if not all(r.strip() for r in right):
        raise wrong("outputs has an empty text")
    asked = prompt.rstrip()
    document, _, question = asked.rpartition("\n")
    if not document.strip():
        raise wrong("input has no document before its last line")
    name = path.absolute().parent.name if path.stem in ("validation", "test") else path.stem
    kinds = {found.rstrip("_-12") for found in _RULER_NAME.findall(name.lower())}
    if len(kinds) != 1:
        raise UsageError(
            f"{source}: {name!r} names {'more than one' if kinds else 'no'} RULER task (known: "
            f"{_RULER_NAMES})",
            "the task decides how answers are scored: name the file after it",
        )
    (kind,) = kinds
    return Item(
        document,
        ((question + prompt[len(asked) :] + prefix).rstrip(),),
        (right,),
        metrics.contains_any if kind == "qa" else metrics.contains,
        max_tokens=_RULER[kind],
        source=source,
    )
