"""Scores of answers, from 0 to 1: by exact match, by the value in the answer, or as in RULER (arXiv
2404.06654, section 3); and intervals around their means."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Sequence

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


Rows = Sequence[Sequence[float]]
Bounds = tuple[float, float] | tuple[None, None]
"""Low and high; None with fewer than two documents, or without numbers."""

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
