"""How an answer is scored: exactly, or as LongBench and RULER score theirs. All in 0 to 1.

LongBench: arXiv 2308.14508, appendix B, and its metrics.py; RULER: arXiv 2404.06654, section 3. The
Chinese tasks of LongBench are not supported.
"""

from __future__ import annotations

import difflib
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from minikv.errors import UsageError

Metric = Callable[[str, Sequence[str], Sequence[str]], float]
"""(answer, right answers, all classes) -> score."""


def interval(score: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval for a mean of n scores in 0 to 1 (for shares it is exact in form)."""
    if n == 0:
        return 0.0, 1.0
    z = 1.96
    middle = (score + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(score * (1 - score) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def exact(answer: str, right: Sequence[str], classes: Sequence[str] = ()) -> float:
    """1 if the answer is one of the right ones, character by character."""
    return float(answer.strip() in right)


def contains(answer: str, right: Sequence[str], classes: Sequence[str] = ()) -> float:
    """RULER's string match: the share of the right strings that occur, in any case."""
    found = answer.lower()
    return sum(r.lower() in found for r in right) / len(right)


def contains_any(answer: str, right: Sequence[str], classes: Sequence[str] = ()) -> float:
    """RULER's match for its question answering tasks: 1 if any right string occurs."""
    found = answer.lower()
    return float(any(r.lower() in found for r in right))


def _plain(text: str) -> list[str]:
    """Words without case, punctuation and articles."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def qa_f1(answer: str, right: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Best F1 of words over the right answers."""

    def f1(a: list[str], b: list[str]) -> float:
        same = sum((Counter(a) & Counter(b)).values())
        return 2 * same / (len(a) + len(b)) if same else 0.0

    return max(f1(_plain(answer), _plain(r)) for r in right)


def rouge_l(answer: str, right: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Best ROUGE-L F1 over the right answers, by the package that LongBench uses."""
    try:
        from rouge import Rouge
    except ImportError:
        raise UsageError(
            "summaries are scored by the package rouge, which is not installed",
            "pip install 'minikv[eval]'",
        ) from None
    if not answer.strip(" ."):
        return 0.0
    return max(float(Rouge().get_scores([answer], [r])[0]["rouge-l"]["f"]) for r in right)


def classification(answer: str, right: Sequence[str], classes: Sequence[str] = ()) -> float:
    """1 / (class names in the answer) if the right one is among them; names inside it count not."""
    best = 0.0
    for r in right:
        named = [c for c in classes if c in answer]
        named = [c for c in named if not (c in r and c != r)]
        best = max(best, 1.0 / len(named) if r in named else 0.0)
    return best


def retrieval(answer: str, right: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the answer that are the right paragraph's."""
    wanted = re.search(r"Paragraph (\d+)", right[0])
    numbers = re.findall(r"\d+", answer)
    return numbers.count(wanted[1]) / len(numbers) if wanted and numbers else 0.0


def count(answer: str, right: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the answer that are the right one."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(right[0]) / len(numbers) if numbers else 0.0


def code(answer: str, right: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Edit similarity of the answer's first line of code."""
    lines = answer.lstrip("\n").split("\n")
    line = next((x for x in lines if not any(mark in x for mark in ("`", "#", "//"))), "")
    return max(
        round(100 * difflib.SequenceMatcher(None, line, r).ratio()) / 100 for r in right
    )


LONGBENCH: dict[str, Metric] = {
    **dict.fromkeys(
        ("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"),
        qa_f1,
    ),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum"), rouge_l),
    "trec": classification,
    "passage_retrieval_en": retrieval,
    "passage_count": count,
    "lcc": code,
    "repobench-p": code,
}
"""LongBench's metric by dataset."""

FIRST_LINE = ("trec", "triviaqa", "samsum")
"""LongBench datasets of which only the first line of an answer counts."""


def lcs(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for x in a:
        before = 0
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], before + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


def likeness(a: str, b: str) -> float:
    """ROUGE-L F1 of the words of two texts; 1 if neither has any."""
    x, y = a.split(), b.split()
    return 2 * lcs(x, y) / (len(x) + len(y)) if x or y else 1.0
