"""The names of the tasks of `minikv eval`; documents with their questions, from files; and the
scores of answers, from 0 to 1: by exact match, by the value in the answer, or as in RULER (arXiv
2404.06654, section 3).

A file of records has one record per line, in the form of RULER. `input` is the whole prompt: a
document and, in its last line, the question, which a cache may not have seen. `outputs` are the
right answers. `answer_prefix`, if given, opens the model's turn. The prompt is asked to the letter.
A file that is named after a task of RULER is scored as in RULER; for any other, the score is the
share of `outputs` in the answer.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from minikv.cli.paths import refuse_many
from minikv.errors import UsageError
from minikv.models.errors import ModelError
from minikv.models.files import read_bytes

CHATS = ("followup", "long")
ANSWERED = ("needle", "facts", *CHATS, "answers")
BESIDE = ("agree", "kl", "ppl")
"""Comparisons with the full cache, for questions and texts."""
TASKS = (*ANSWERED, *BESIDE)
"""The tasks that --tasks takes; `answers` is for the records of files."""


# -- scores ---------------------------------------------------------------------------------------

Metric = Callable[[str, Sequence[str]], float]
"""(answer, right answers) -> score."""


def exact(answer: str, right: Sequence[str]) -> float:
    """1 if the answer is one of the right ones, character by character."""
    return float(answer.strip() in right)


_FINAL = " .,;:!?…。\"'”’»)"
"""Characters that may follow a value in a sentence and are not part of it."""


def contains_words(answer: str, right: Sequence[str]) -> float:
    """1 if one of the right ones occurs in the answer as whole words, in any case.

    A word is made of letters, digits and combining marks. A hyphen between these is part of the
    word, and so is a point, comma or colon between digits: "twenty-one" does not contain "one", and
    "12.5" does not contain "5". An answer that lists many values is right if the right one is among
    them.
    """
    text = _folded(answer)
    return float(any(_occurs(_folded(r).rstrip(_FINAL), text) for r in right))


def _folded(text: str) -> str:
    """The text normalised in case, compatibility forms and white space."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(unicodedata.normalize("NFKC", folded).split())


def _occurs(value: str, text: str) -> bool:
    at = text.find(value) if value else -1
    while at >= 0:
        if not _inside(text, at) and not _inside(text, at + len(value)):
            return True
        at = text.find(value, at + 1)
    return False


def _inside(text: str, at: int) -> bool:
    """Whether the position `at` is inside a word."""
    a, b, c, d = (text[i] if 0 <= i < len(text) else " " for i in range(at - 2, at + 2))
    return (_in_word(b) and _in_word(c)) or _joined(a, b, c) or _joined(b, c, d)


def _joined(left: str, between: str, right: str) -> bool:
    if between == "-":
        return _in_word(left) and _in_word(right)
    return between in ".,:" and left.isdigit() and right.isdigit()


def _in_word(character: str) -> bool:
    return character.isalnum() or unicodedata.category(character).startswith("M")


def contains(answer: str, right: Sequence[str]) -> float:
    """RULER's string match: the share of the right strings that occur, in any case."""
    found = answer.lower()
    return sum(r.lower() in found for r in right) / len(right)


def contains_any(answer: str, right: Sequence[str]) -> float:
    """RULER's match for its question answering tasks: 1 if any right string occurs."""
    found = answer.lower()
    return float(any(r.lower() in found for r in right))


# -- items ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Item:
    """One document and its questions, asked in one chat in this order; or, if `apart`, each as the
    first one about the document.

    right[i]: the right answers to question i. source: file and line. name: the document's name in
    the chat; None: document and question are the whole message, to the letter. opens: the given
    beginning of an answer. groups: names whose scores are also shown separately. Without questions
    the document is a text to be continued.
    """

    document: str
    questions: tuple[str, ...]
    right: tuple[tuple[str, ...], ...]
    metric: Metric = exact
    max_tokens: int = 32
    source: str = ""
    name: str | None = "report.txt"
    apart: bool = False
    opens: str = ""
    groups: tuple[str, ...] = ()

    def single(self) -> Iterator[Item]:
        """An item for each question, if they are asked apart; otherwise this one."""
        if not self.apart:
            yield self
            return
        for question, right in zip(self.questions, self.right, strict=True):
            yield replace(self, questions=(question,), right=(right,), apart=False)


_LARGEST = 1 << 30  # bytes of a file
_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}  # of an answer; others: 128
_TASK = re.compile(r"(?<![a-z0-9])(niah|vt|cwe|fwe|qa(?=[_-]?[12]))(?![a-z])")


def read_items(path: Path) -> Iterator[Item]:
    """The items of a file. Raises UsageError that names the line."""
    try:
        data = read_bytes(path, _LARGEST)
        refuse_many(data)
        text = data.decode("utf-8-sig")  # some editors begin a file with a byte order mark
        del data
    except (ModelError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}", "give a JSONL file") from None
    number = 0
    # Not splitlines: JSON texts may contain the other line ends of Unicode.
    for line, record in enumerate(text.split("\n"), 1):
        if record.strip():
            number, source = line, f"{path}, line {line}"
            try:
                yield _item(path, source, record)
            except ValueError as error:
                hint = "a record has input, whose last line is the question, and a list of outputs"
                raise UsageError(f"{source}: {error}", hint) from None
    if not number:
        raise UsageError(f"{path} is empty", "give a JSONL file with one record per line")


def is_text(path: Path) -> bool:
    """Whether a file is a text instead of records."""
    return path.suffix.lower() not in (".json", ".jsonl")


def named(path: Path) -> str:
    """The task of a file: its name, or that of its folder, as RULER's scripts write it."""
    return path.absolute().parent.name if path.stem in ("validation", "test") else path.stem


def _item(path: Path, source: str, text: str) -> Item:
    """Raises ValueError that says what is wrong."""
    fields = _loaded(text)
    prompt, right = _text(fields, "input"), fields.get("outputs")
    if not isinstance(right, list) or not right:
        raise ValueError("outputs is not a list of texts" if right else "no outputs")
    answers = tuple(_text({"outputs": one}, "outputs") for one in right)
    prefix = _text(fields, "answer_prefix", empty=True) if fields.get("answer_prefix") else ""
    document, _, _ = prompt.rstrip().rpartition("\n")
    if not document.strip():
        raise ValueError("input has no document before its last line")
    kinds = set(_TASK.findall(named(path).lower()))
    kind, cut = kinds.pop() if len(kinds) == 1 else "", len(document) + 1
    return Item(
        prompt[:cut],
        (prompt[cut:],),
        (answers,),
        contains_any if kind == "qa" else contains,
        _TOKENS.get(kind, 128),
        source=source,
        name=None,
        opens=prefix if prefix.strip() else "",
    )


def _loaded(text: str) -> dict[str, object]:
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg})") from None
    except (ValueError, RecursionError):
        raise ValueError("a number too long or lists too deep to read") from None
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    return fields


def _text(fields: dict[str, object], name: str, *, empty: bool = False) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} is not a text" if name in fields else f"no {name}")
    if not value.strip() and not empty:
        raise ValueError(f"{name} is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} has a lone surrogate at character {error.start:,}") from None
    return value
