"""Questions from files: LongBench, LongBench v2 and RULER records, as their projects publish them.

Each is asked with its official prompt, to the letter, and scored as published (arXiv 2308.14508,
2412.15204 and 2404.06654). LongBench's prompts are in `prompts/`, under the licence beside them;
RULER's records hold theirs. The text up to the end of the document is the item's document, the rest
its question, which a cache may not have seen. LongBench-E has the same prompts for other records
(`qasper_e`). The Chinese datasets are not supported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from minikv.cli.eval import metrics
from minikv.cli.eval.items import Item
from minikv.cli.eval.metrics import Metric
from minikv.cli.records import refuse_many
from minikv.errors import UsageError
from minikv.models.errors import ModelError
from minikv.models.files import read_bytes

_LARGEST = 1 << 30  # bytes of a file
_LABEL = 40  # characters of a group's name
_WANTED = (
    "LongBench records have context, input, answers, dataset; LongBench v2's context, question, "
    "choice_A to choice_D and answer; RULER's input and outputs"
)


def read_items(path: Path) -> Iterator[Item]:
    """The items of a LongBench or RULER file. Raises UsageError that names the line.

    A file has one record in a line, or, as LongBench v2 is published, one list of them.
    """
    try:
        # Not splitlines: JSON texts may hold the other characters that Unicode calls a line's end.
        data = read_bytes(path, _LARGEST)
        refuse_many(data)
        text = data.decode("utf-8-sig")  # some editors begin a file with a byte order mark
        del data
    except (ModelError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}", "give a JSONL file") from None
    number = 0
    if text.lstrip().startswith("["):
        records = _loaded(text, _wrong(str(path)))
        assert isinstance(records, list)
        for number, record in enumerate(records, 1):
            yield _item(path, f"{path}, record {number}", record)
    else:
        for line, record in enumerate(text.split("\n"), 1):
            if record.strip():
                source, number = f"{path}, line {line}", line
                yield _item(path, source, _loaded(record, _wrong(source)))
    if not number:
        raise UsageError(f"{path} is empty", "give a JSONL file with one record per line")


def is_text(path: Path) -> bool:
    """Whether a file is no record but a text."""
    return path.suffix.lower() not in (".json", ".jsonl")


def named(path: Path) -> str:
    """The task of a file: its name, or, as RULER's own scripts write it, its folder's."""
    return path.absolute().parent.name if path.stem in ("validation", "test") else path.stem


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

    def need(self, name: str, good: bool, what: str) -> None:
        """Raise UsageError unless it is good: `what` is wrong with the field."""
        if not good:
            raise self.wrong(f"{name} {what}" if name in self.fields else f"no {name}")

    def text(self, name: str, *, filled: bool = False) -> str:
        value = self.fields.get(name)
        self.need(name, isinstance(value, str), "is not a text")
        assert isinstance(value, str)
        self.need(name, bool(value.strip()) or not filled, "is empty")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self.wrong(f"{name} has a lone surrogate at character {error.start:,}") from None
        return value

    def label(self, name: str) -> str:
        """A text that a table may show."""
        value = self.text(name, filled=True)
        what = f"is not a line of at most {_LABEL} characters without control characters"
        self.need(name, len(value) <= _LABEL and value.isprintable(), what)
        return value

    def count(self, name: str) -> int:
        value = self.fields.get(name)
        if isinstance(value, float) and value.is_integer():  # of a table's column with gaps
            value = int(value)
        self.need(name, type(value) is int and value >= 0, "is not a whole number of 0 or more")
        assert isinstance(value, int)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.fields.get(name)
        self.need(name, isinstance(value, list), "is not a list of texts")
        assert isinstance(value, list)
        self.need(name, all(isinstance(x, str) for x in value), "is not a list of texts")
        self.need(name, bool(value), "is empty")
        return tuple(_Record({name: x}, self.wrong).text(name) for x in value)


def _item(path: Path, source: str, fields: object) -> Item:
    record = _Record(fields, _wrong(source))
    if "context" not in record.fields and "outputs" in record.fields:
        return _ruler(path, source, record)
    if "choice_A" in record.fields:
        return _choices(source, record)
    return _longbench(path, source, record)


# -- LongBench --------------------------------------------------------------------------------

PROMPTS = Path(__file__).parent / "prompts"


@dataclass(frozen=True, slots=True)
class Dataset:
    """How a dataset is asked and scored.

    `max_tokens` of an answer, of which only the first line counts if `first_line` is set. Without
    `roles` the prompt is fed as it is, to be completed: the release does so with examples and code,
    also to chat models.
    """

    metric: Metric
    max_tokens: int
    roles: bool = True
    first_line: bool = False


_QA, _SHORT_QA = Dataset(metrics.qa_f1, 128), Dataset(metrics.qa_f1, 32)
_SUMMARY, _CODE = Dataset(metrics.rouge_l, 512), Dataset(metrics.code, 64, roles=False)
DATASETS = {
    "narrativeqa": _QA,
    "qasper": _QA,
    "multifieldqa_en": Dataset(metrics.qa_f1, 64),
    "hotpotqa": _SHORT_QA,
    "2wikimqa": _SHORT_QA,
    "musique": _SHORT_QA,
    "gov_report": _SUMMARY,
    "qmsum": _SUMMARY,
    "multi_news": _SUMMARY,
    "trec": Dataset(metrics.classification, 64, roles=False, first_line=True),
    "triviaqa": Dataset(metrics.qa_f1, 32, roles=False, first_line=True),
    "samsum": Dataset(metrics.rouge_l, 128, roles=False, first_line=True),
    "passage_count": Dataset(metrics.count, 32),
    "passage_retrieval_en": Dataset(metrics.retrieval, 32),
    "lcc": _CODE,
    "repobench-p": _CODE,
}


def _longbench(path: Path, source: str, record: _Record) -> Item:
    given = record.text("dataset")
    name = given.removesuffix("_e")
    dataset = DATASETS.get(name)
    if dataset is None:
        raise record.wrong(f"dataset {given!r} is not supported (supported: {', '.join(DATASETS)})")
    prompts: dict[str, str] = json.loads((PROMPTS / "longbench.json").read_text("utf-8"))
    head, tail = prompts[name].split("{context}")
    document, right = record.text("context", filled=True), record.texts("answers")
    asks = record.text("input", filled="{input}" in tail)
    classes = record.texts("all_classes") if dataset.metric is metrics.classification else ()
    if classes and not {*classes} & {*right}:
        raise record.wrong("none of answers is in all_classes")
    if dataset.metric is metrics.retrieval and not all(map(metrics.PARAGRAPH.search, right)):
        raise record.wrong("an answer names no paragraph, as in Paragraph 1")
    groups: tuple[str, ...] = ()
    if (given != name or path.stem.endswith("_e")) and record.has("length"):
        words = record.count("length")  # of the document: LongBench-E tells scores apart by it
        groups = ("0-4k" if words < 4000 else "4-8k" if words < 8000 else "8k+",)
    return Item(
        head + document,
        (tail.replace("{input}", asks),),
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


def _choices(source: str, record: _Record) -> Item:
    """LongBench v2: four choices. Its release strips all that it puts into the prompt."""
    said = {"$Q$": record.text("question", filled=True)}
    said |= {f"$C_{x}$": record.text(f"choice_{x}") for x in "ABCD"}
    right = record.text("answer")
    if right not in ("A", "B", "C", "D"):
        raise record.wrong("answer is not A, B, C or D")
    groups = tuple(record.label(x) for x in ("difficulty", "length") if record.has(x))
    head, tail = (PROMPTS / "longbench-v2.txt").read_text("utf-8").split("$DOC$")
    # In one go, so that nothing in a question is taken for a mark.
    asks = re.sub("|".join(map(re.escape, said)), lambda found: said[found[0]].strip(), tail)
    return Item(
        head + record.text("context", filled=True).strip(),
        (asks,),
        ((right,),),
        metrics.choice,
        max_tokens=128,
        source=source,
        name=None,
        groups=groups,
    )


# -- RULER ------------------------------------------------------------------------------------

_RULER = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}  # tokens of an answer
_RULER_NAME = re.compile(r"(?<![a-z0-9])(niah|vt|cwe|fwe|qa[_-]?[12])(?![a-z0-9])")


def _ruler(path: Path, source: str, record: _Record) -> Item:
    """The record has the whole prompt; its last line is the question. The beginning of the answer
    ends the prompt in older records, and is a field in newer ones, which opens the model's turn.
    The file or, as RULER's scripts write it, the folder says the task.
    """
    prefix = record.text("answer_prefix") if record.fields.get("answer_prefix") is not None else ""
    prompt, right = record.text("input"), record.texts("outputs")
    if not all(r.strip() for r in right):
        raise record.wrong("outputs has an empty text")
    document, _, _ = prompt.rstrip().rpartition("\n")
    if not document.strip():
        raise record.wrong("input has no document before its last line")
    kinds = {found.rstrip("_-12") for found in _RULER_NAME.findall(named(path).lower())}
    if len(kinds) != 1:
        raise UsageError(
            f"{source}: {named(path)!r} names {'more than one' if kinds else 'no'} RULER task "
            "(known: niah_*, vt, cwe, fwe, qa_1, qa_2)",
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
