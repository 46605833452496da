"""Scores of answers, from 0 to 1: by exact match, by the value in the answer, or as RULER does it
(arXiv 2404.06654, section 3)."""

from __future__ import annotations

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


def contains(answer: str, right: Sequence[str]) -> float:
    """RULER's string match: the share of the right strings that occur, in any case."""
    found = answer.lower()
    return sum(r.lower() in found for r in right) / len(right)


def contains_any(answer: str, right: Sequence[str]) -> float:
    """RULER's match for its question answering tasks: 1 if any right string occurs."""
    found = answer.lower()
    return float(any(r.lower() in found for r in right))
