"""Scores of answers, from 0 to 1: by exact match, by the value in the answer, or as in LongBench
and RULER.

LongBench: arXiv 2308.14508, appendix B, and its metrics.py; LongBench v2: arXiv 2412.15204; RULER:
arXiv 2404.06654, section 3. The Chinese tasks of LongBench are not supported.
"""

from __future__ import annotations

import difflib
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from minikv.errors import UsageError

Metric = Callable[[str, Sequence[str], Sequence[str]], float]
"""(answer, right answers, all classes) -> score."""


def exact(answer: str, right: Sequence[str], classes: Sequence[str] = ()) -> float:
    """1 if the answer is one of the right ones, character by character."""
    return float(answer.strip() in right)


_FINAL = " .,;:!?…。\"'”’»)"
"""Characters that may follow a value in a sentence and are not part of it."""


def contains_words(answer: str, right: Sequence[str], classes: Sequence[str] = ()) -> float:
    """1 if one of the right ones occurs in the answer as whole words, in any case.

    A word is made of letters, digits and combining marks. A hyphen between these is part of the
    word, and so is a point, comma or colon between digits: "twenty-one" does not contain "one", and
    "12.5" does not contain "5". An answer that lists many values is right if the right one is among
    them.
    """
    text = _folded(answer)
    return float(any(_occurs(_folded(r).rstrip(_FINAL), text) for r in right))


def values_found(answer: str, right: Sequence[str], classes: Sequence[str] = ()) -> float:
    """The share of the right values that occur in the answer as whole words, in any case."""
    return sum(contains_words(answer, [r]) for r in right) / len(right)


def _folded(text: str) -> str:
    """The text without differences of case, compatibility forms and white space."""
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


def contains(answer: str, right: Sequence[str], classes: Sequence[str] = ()) -> float:
    """RULER's string match: the share of the right strings that occur, in any case."""
    found = answer.lower()
    return sum(r.lower() in found for r in right) / len(right)


def contains_any(answer: str, right: Sequence[str], classes: Sequence[str] = ()) -> float:
    """RULER's match for its question answering tasks: 1 if any right string occurs."""
    found = answer.lower()
    return float(any(r.lower() in found for r in right))


def _best(score: Callable[..., float]) -> Metric:
    """A metric that is the highest `score(answer, right, classes)` over the right answers."""

    def metric(answer: str, right: Sequence[str], classes: Sequence[str] = ()) -> float:
        return max(score(answer, r, classes) for r in right)

    metric.__name__, metric.__doc__ = score.__name__, score.__doc__
    return metric


def _plain(text: str) -> list[str]:
    """The words in lower case, without punctuation and articles."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


@_best
def qa_f1(answer: str, right: str, classes: Sequence[str]) -> float:
    """The F1 of words."""
    a, b = _plain(answer), _plain(right)
    same = sum((Counter(a) & Counter(b)).values())
    return 2 * same / (len(a) + len(b)) if same else 0.0


def rouge() -> Any:
    """The scorer that LongBench uses. Raises UsageError where its package is not installed."""
    try:
        from rouge import Rouge
    except ImportError:
        raise UsageError(
            "summaries are scored by the package rouge, which is not installed",
            "pip install 'minikv[eval]'",
        ) from None
    return Rouge()


@_best
def rouge_l(answer: str, right: str, classes: Sequence[str]) -> float:
    """The ROUGE-L F1. The scorer raises on some texts, such as empty ones: LongBench then scores 0,
    whatever was raised."""
    scorer = rouge()
    try:
        return float(scorer.get_scores([answer], [right], avg=True)["rouge-l"]["f"])
    except Exception:
        return 0.0


@_best
def classification(answer: str, right: str, classes: Sequence[str]) -> float:
    """1 / (number of class names in the answer) if the right one is among them, else 0.

    Names that are a part of the right one are first removed, in the way LongBench does it: from the
    list that is iterated over, so that the name after a removed one is not checked.
    """
    named = [c for c in classes if c in answer]
    i = 0
    while i < len(named):
        if named[i] in right and named[i] != right:
            named.remove(named[i])
        i += 1
    return 1.0 / len(named) if right in named else 0.0


PARAGRAPH = re.compile(r"Paragraph (\d+)")
"""The form of a right answer of passage_retrieval_en."""


def retrieval(answer: str, right: Sequence[str], classes: Sequence[str] = ()) -> float:
    """The share of the numbers in the answer that are the right paragraph's, the highest over the
    right answers."""
    wanted = [found[1] for r in right if (found := PARAGRAPH.search(r))]
    return count(answer, wanted) if wanted else 0.0


def count(answer: str, right: Sequence[str], classes: Sequence[str] = ()) -> float:
    """The share of the numbers in the answer that are the right one, the highest over the right
    answers."""
    numbers = re.findall(r"\d+", answer)
    return max(numbers.count(r) for r in right) / len(numbers) if numbers else 0.0


_CHOSEN = (r"The correct answer is \(([A-D])\)", r"The correct answer is ([A-D])")


def choice(answer: str, right: Sequence[str], classes: Sequence[str] = ()) -> float:
    """LongBench v2's: 1 if the answer gives the right letter, in the words that the prompt demands.
    An answer without these words scores 0."""
    plain = answer.replace("*", "")
    for pattern in _CHOSEN:
        if found := re.search(pattern, plain):
            return float(found[1] in right)
    return 0.0


@_best
def code(answer: str, right: str, classes: Sequence[str]) -> float:
    """The edit similarity of the answer's first line of code and a right answer, rounded to
    0.01."""
    lines = answer.lstrip("\n").split("\n")
    line = next((x for x in lines if not any(mark in x for mark in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, line, right).ratio()) / 100
