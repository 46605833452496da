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
    """The 97.5 % quantile of Student's t for one degree of freedom less than there are documents.
    Beyond the table, from a series with an error below 0.001."""
    freedom = len(rows) - 1
    if freedom <= len(_T):
        return _T[freedom - 1]
    return _Z + 2.372 / freedom + 2.823 / freedom**2 + 2.556 / freedom**3
