"""Questions from files: LongBench, LongBench v2 and RULER records, as their projects publish them.

Each is asked with its official prompt, to the letter: LongBench's are put around a record's
document (see `longbench`), RULER's are whole in its records. What stands up to the end of the
document is the item's document; what follows is its question, which a cache may not have seen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from minikv.cli.eval import longbench, metrics
from minikv.cli.eval.longbench import CHOICES, DATASETS, Dataset, Prompt
from minikv.cli.eval.metrics import Metric
from minikv.cli.json_limits import refuse_many
from minikv.errors import UsageError
from minikv.models.errors import ModelError
from minikv.models.files import read_bytes


@dataclass(frozen=True, slots=True)
class Item:
    """One document and its questions, asked in one chat in this order; or, if they are asked
    `apart`, each as the first one about the document.

    `right[i]` are the right answers to question i; `where` places the item on a map, as
    (depth, length) for needles; `first_line`: only the first line of an answer counts; `source`
    is its file and line. `name`: the document's in the chat; None: the document and a question are
    the whole message, to the letter. Without `roles` this text is completed, outside of a chat.
    `opens[i]`: how answer i begins, which is not the model's doing. `groups`: names of what the
    item belongs to, whose scores are also shown apart. `at_once`: all questions stand in the first
    message, and are answered in one answer (see `interview`).
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
    name: str | None = "report.txt"
    roles: bool = True
    apart: bool = False
    opens: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()

    def single(self) -> Iterator[Item]:
        """The questions one by one, if they are asked apart; else this one."""
        if not self.apart:
            yield self
            return
        for i, question in enumerate(self.questions):
            opens = self.opens[i : i + 1]
            right = (self.right[i],)
            yield replace(self, questions=(question,), right=right, opens=opens, apart=False)

    at_once: bool = False

    @property
    def opening(self) -> str:
        """What is asked with the document; of questions that are asked at once, the one that is
        answered first stands last."""
        first, *others = self.questions
        return " ".join((*others, first)) if self.at_once else first


_LARGEST = 1 << 30  # bytes of a file
_LABEL = 40  # characters of a group's name
_RULER = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}  # tokens of an answer
_RULER_NAME = re.compile(r"(?<![a-z0-9])(niah|vt|cwe|fwe|qa[_-]?[12])(?![a-z0-9])")
_RULER_NAMES = "niah_*, vt, cwe, fwe, qa_1, qa_2"


def read_items(path: Path) -> Iterator[Item]:
    """The items of a LongBench or RULER file. Raises UsageError that names the line.

    Records stand one in a line, or, as LongBench v2 is published, in one list.
    """
    try:
        # Not splitlines: JSON texts may hold the other characters that Unicode calls a line's end.
        data = read_bytes(path, _LARGEST)
        refuse_many(data)
        text = data.decode("utf-8-sig")  # some editors begin a file with a byte order mark
        del data
    except (ModelError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}", "give a JSONL file") from None
    if text.lstrip().startswith("["):
        records = _loaded(text, lambda what: UsageError(f"{path}: {what}", _WANTED))
        if not isinstance(records, list):
            raise UsageError(f"{path}: not a list of records", _WANTED)
        made = [_item(path, f"{path}, record {n}", record) for n, record in enumerate(records, 1)]
        yield from made
        found = bool(made)
    else:
        found = False
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                found = True
                source = f"{path}, line {number}"
                yield _item(path, source, _loaded(line, _wrong(source)))
    if not found:
        raise UsageError(f"{path} is empty", "give a JSONL file with one record per line")


def named(path: Path) -> str:
    """The task of a file: its name, or, as RULER's own scripts write it, its folder's."""
    return path.absolute().parent.name if path.stem in ("validation", "test") else path.stem


def scored(items: Iterable[Item]) -> str:
    """The names of the metrics that score these, as a report has them."""
    return ", ".join(dict.fromkeys(item.metric.__name__ for item in items))


_WANTED = (
    "LongBench records have context, input, answers, dataset; LongBench v2's context, question, "
    "choice_A to choice_D and answer; RULER's input and outputs"
)
_Wrong = Callable[[str], UsageError]
"""What is wrong -> the error that says where."""


def _wrong(source: str) -> _Wrong:
    return lambda what: UsageError(f"{source}: {what}", _WANTED)


def _loaded(text: str, wrong: _Wrong) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise wrong(f"not JSON ({error.msg})") from None
    except (ValueError, RecursionError):
        raise wrong("a number too long or lists too deep to read") from None


class _Record:
    """A record's fields, checked when they are asked for."""

    def __init__(self, fields: object, wrong: _Wrong) -> None:
        if not isinstance(fields, dict):
            raise wrong("not a JSON object")
        self.fields, self.wrong = fields, wrong

    def has(self, name: str) -> bool:
        """Whether an optional field is given: null and "" are how tables write that it is not."""
        return self.fields.get(name) not in (None, "")

    def _checked(self, name: str, value: str) -> str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self.wrong(f"{name} has a lone surrogate at character {error.start:,}") from None
        return value

    def text(self, name: str) -> str:
        value = self.fields.get(name)
        if not isinstance(value, str):
            missing = name not in self.fields
            raise self.wrong(f"no {name}" if missing else f"{name} is not a text")
        return self._checked(name, value)

    def filled(self, name: str) -> str:
        value = self.text(name)
        if not value.strip():
            raise self.wrong(f"{name} is empty")
        return value

    def label(self, name: str) -> str:
        """A text that a table may show."""
        value = self.filled(name)
        if len(value) > _LABEL or not value.isprintable():
            raise self.wrong(
                f"{name} is not a line of at most {_LABEL} characters without control characters"
            )
        return value

    def count(self, name: str) -> int:
        value = self.fields.get(name)
        if isinstance(value, float) and value.is_integer():  # of a table's column with gaps
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.wrong(f"{name} is not a whole number of 0 or more")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.fields.get(name)
        if name not in self.fields:
            raise self.wrong(f"no {name}")
        if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
            raise self.wrong(f"{name} is not a list of texts")
        if not value:
            raise self.wrong(f"{name} is empty")
        return tuple(self._checked(name, x) for x in value)


def _item(path: Path, source: str, fields: object) -> Item:
    record = _Record(fields, _wrong(source))
    if "context" not in record.fields and "outputs" in record.fields:
        return _ruler(path, source, record)
    if "choice_A" in record.fields:
        return _choices(source, record)
    return _longbench(path, source, record)


def _longbench(path: Path, source: str, record: _Record) -> Item:
    given = record.text("dataset")
    name = given.removesuffix("_e")
    dataset = DATASETS.get(name)
    if dataset is None:
        raise record.wrong(f"dataset {given!r} is not supported (supported: {', '.join(DATASETS)})")
    document, right = record.filled("context"), record.texts("answers")
    prompt = longbench.prompt(name)
    asks = record.filled("input") if prompt.has_input else record.text("input")
    classes = record.texts("all_classes") if dataset.metric is metrics.classification else ()
    if classes and not {*classes} & {*right}:
        raise record.wrong("none of answers is in all_classes")
    if dataset.metric is metrics.retrieval and not all(map(metrics.PARAGRAPH.search, right)):
        raise record.wrong("an answer names no paragraph, as in Paragraph 1")
    groups: tuple[str, ...] = ()
    if (given != name or path.stem.endswith("_e")) and record.has("length"):
        groups = (longbench.length_group(record.count("length")),)
    tail = prompt.tail.replace("{input}", asks)
    return _official(source, dataset, Prompt(prompt.head, tail), document, right, classes, groups)


def _choices(source: str, record: _Record) -> Item:
    """LongBench v2: four choices. Its release strips all that it puts into the prompt."""
    prompt = longbench.choice_prompt(
        record.filled("question"), {x: record.text(f"choice_{x}") for x in "ABCD"}
    )
    right = record.text("answer")
    if right not in ("A", "B", "C", "D"):
        raise record.wrong("answer is not A, B, C or D")
    groups = tuple(record.label(x) for x in ("difficulty", "length") if record.has(x))
    document = record.filled("context").strip()
    return _official(source, CHOICES, prompt, document, (right,), (), groups)


def _official(
    source: str,
    dataset: Dataset,
    prompt: Prompt,
    document: str,
    right: tuple[str, ...],
    classes: tuple[str, ...],
    groups: tuple[str, ...],
) -> Item:
    return Item(
        prompt.head + document,
        (prompt.tail,),
        (right,),
        dataset.metric,
        classes,
        dataset.max_tokens,
        first_line=dataset.first_line,
        source=source,
        name=None,
        roles=dataset.roles,
        groups=groups,
    )


def _ruler(path: Path, source: str, record: _Record) -> Item:
    """RULER gives the whole prompt; its last line is the question. How the answer begins ends the
    prompt in older records. In newer ones it stands alone and opens the model's own turn. The file
    or, as its own scripts write it, the folder says the task.
    """
    prefix = record.text("answer_prefix") if record.fields.get("answer_prefix") is not None else ""
    prompt, right = record.text("input"), record.texts("outputs")
    if not all(r.strip() for r in right):
        raise record.wrong("outputs has an empty text")
    document, _, _ = prompt.rstrip().rpartition("\n")
    if not document.strip():
        raise record.wrong("input has no document before its last line")
    name = named(path)
    kinds = {found.rstrip("_-12") for found in _RULER_NAME.findall(name.lower())}
    if len(kinds) != 1:
        raise UsageError(
            f"{source}: {name!r} names {'more than one' if kinds else 'no'} RULER task (known: "
            f"{_RULER_NAMES})",
            "the task decides how answers are scored: name the file after it",
        )
    (kind,) = kinds
    cut = len(document) + 1
    return Item(
        prompt[:cut],
        (prompt[cut:],),
        (right,),
        metrics.contains_any if kind == "qa" else metrics.contains,
        max_tokens=_RULER[kind],
        source=source,
        name=None,
        opens=(prefix,) if prefix.strip() else (),
    )


def together(items: Iterable[Item]) -> list[Item]:
    """Records that share a document as one item, whose questions are asked apart: it is read, and
    under `blind` evicted, once for all of them."""
    found: dict[Item, list[Item]] = {}
    for item in items:
        begun = ("",) if item.opens else ()
        key = replace(item, questions=(), right=(), opens=begun, source="")
        found.setdefault(key, []).append(item)
    made = []
    for alike in found.values():
        opens = [opened for item in alike for opened in item.opens]
        made.append(
            replace(
                alike[0],
                questions=tuple(question for item in alike for question in item.questions),
                right=tuple(right for item in alike for right in item.right),
                opens=tuple(opens),
                apart=len(alike) > 1,
            )
        )
    return made
