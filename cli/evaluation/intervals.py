"""95 % intervals over documents: what is said about one document is not independent.

Rows are [document][question] or [document][token]. The mean over all of them is a ratio of two sums
over documents, and its error is that of a ratio estimator with the documents as the units (Cochran,
Sampling Techniques, 3rd edition, section 6.3), by Student's t for the few documents there may be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Rows = Sequence[Sequence[float]]
Bounds = tuple[float, float] | tuple[None, None]
"""Low and high; None where a single document says nothing about others."""

_Z = 1.96
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def wilson(score: float, n: float) -> tuple[float, float]:
    """Wilson's interval for a mean of n independent scores in 0 to 1 (exact in form for shares)."""
    if n == 0:
        return 0.0, 1.0
    middle = (score + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z * math.sqrt(score * (1 - score) / n + (_Z / (2 * n)) ** 2) / (1 + _Z**2 / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def of_shares(rows: Rows) -> Bounds:
    """For the mean of scores in 0 to 1: Wilson's, where every document has one question.

    With more it is Wilson's for as many questions as would say as much if they were independent
    (Korn and Graubard, Survey Methodology 24, 1998): at most those there are, and where all scores
    are 0 or all are 1, which shows nothing of how alike a document's are, one per document.
    """
    n = sum(map(len, rows))
    if len(rows) < 2 or not n:
        return None, None
    mean, error = _ratio(rows)
    if n == len(rows):
        return wilson(mean, n)
    spread = mean * (1 - mean)
    worth = min(n, spread / error**2) if error else n
    return wilson(mean, (worth if spread > 0 else len(rows)) * (_Z / _student(rows)) ** 2)


def of_means(rows: Rows) -> Bounds:
    """For a mean of any numbers, such as the nats of tokens."""
    if len(rows) < 2 or not any(rows):
        return None, None
    mean, error = _ratio(rows)
    half = _student(rows) * error
    return mean - half, mean + half


def _ratio(rows: Rows) -> tuple[float, float]:
    """The mean over all and its standard error."""
    n, documents = sum(map(len, rows)), len(rows)
    mean = sum(map(sum, rows)) / n
    apart = sum((sum(row) - mean * len(row)) ** 2 for row in rows)
    return mean, math.sqrt(documents / (documents - 1) * apart) / n


def _student(rows: Rows) -> float:
    """The 97.5 % quantile of Student's t; beyond the table by its expansion, to three digits."""
    freedom = len(rows) - 1
    if freedom <= len(_T):
        return _T[freedom - 1]
    return _Z + 2.372 / freedom + 2.823 / freedom**2 + 2.556 / freedom**3
