"""95 % intervals of means over documents. Scores of one document are not independent, so the
documents are the sampling units.

Rows are [document][question] or [document][token]. The mean over all of them is a ratio of two sums
over documents, so its error is that of a ratio estimator (Cochran, Sampling Techniques, 3rd
edition, section 6.3). Student's t is used because there may be few documents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Rows = Sequence[Sequence[float]]
Bounds = tuple[float, float] | tuple[None, None]
"""Low and high; None with fewer than two documents, or without numbers."""

_Z = 1.96
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def wilson(score: float, n: float) -> tuple[float, float]:
    """Wilson's interval for a mean of n independent scores in 0 to 1. It was derived for shares, so
    for scores that are 0 or 1."""
    if n == 0:
        return 0.0, 1.0
    middle = (score + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z * math.sqrt(score * (1 - score) / n + (_Z / (2 * n)) ** 2) / (1 + _Z**2 / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def of_shares(rows: Rows) -> Bounds:
    """The interval of a mean of scores in 0 to 1: Wilson's, if every document has one question.

    With more questions, Wilson's n is the effective number of questions: so many independent ones
    would have the same error (Korn and Graubard, Survey Methodology 24, 1998). It is at most the
    real number. If all scores are 0 or all are 1, it is one per document, because such scores do
    not show how similar those of a document are. For few documents it is multiplied by
    (1.96 / t)^2.
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


def _ratio(rows: Rows) -> tuple[float, float]:
    """The mean over all numbers, and its standard error."""
    n, documents = sum(map(len, rows)), len(rows)
    mean = sum(map(sum, rows)) / n
    apart = sum((sum(row) - mean * len(row)) ** 2 for row in rows)
    return mean, math.sqrt(documents / (documents - 1) * apart) / n


def _student(rows: Rows) -> float:
    """The 97.5 % quantile of Student's t for one degree of freedom less than there are documents.
    Beyond the table, from a series with an error below 0.001."""
    freedom = len(rows) - 1
    if freedom <= len(_T):
        return _T[freedom - 1]
    return _Z + 2.372 / freedom + 2.823 / freedom**2 + 2.556 / freedom**3
