"""Intervals over documents, by hand."""

from __future__ import annotations

import pytest

from minikv.cli.eval import intervals


def test_wilson_interval() -> None:
    low, high = intervals.wilson(0.9, 100)
    assert (round(low, 4), round(high, 4)) == (0.8256, 0.9448)
    assert intervals.wilson(1.0, 20)[1] == 1.0
    assert intervals.wilson(0.0, 20)[0] == 0.0
    assert intervals.wilson(0.5, 0) == (0.0, 1.0)


def test_an_interval_of_shares_is_over_documents() -> None:
    single = [[1.0]] * 90 + [[0.0]] * 10
    assert intervals.of_shares(single) == pytest.approx(intervals.wilson(0.9, 100))
    # Six answers that are always alike say as much as one, and Student's t makes it a little less.
    alike = intervals.of_shares([row * 6 for row in single])
    t = 1.9842
    assert alike == pytest.approx(intervals.wilson(0.9, 99 * (1.96 / t) ** 2), abs=1e-4)
    # Documents that do not differ at all are worth every question; more than that none is.
    t = 2.0096
    even = intervals.of_shares([[1.0, 0.0]] * 50)
    assert even == pytest.approx(intervals.wilson(0.5, 100 * (1.96 / t) ** 2), abs=1e-4)
    # All right: nothing is known of how alike they are, so a document counts once.
    low, high = intervals.of_shares([[1.0] * 6] * 50)
    assert (low, high) == pytest.approx(intervals.wilson(1.0, 50 * (1.96 / t) ** 2), abs=1e-4)
    assert intervals.of_shares([[1.0, 0.0, 1.0]]) == (None, None)
    assert intervals.of_shares([]) == (None, None)


def test_an_interval_of_means_is_over_documents() -> None:
    """Two sums and counts by hand: 3 + 1 over 2 + 2 tokens; the mean 1, its error (1, -1) / 4."""
    low, high = intervals.of_means([[2.0, 1.0], [0.0, 1.0]])
    assert (low, high) == pytest.approx((1 - 12.706 * 0.5, 1 + 12.706 * 0.5))
    # A document twice as long weighs twice as much, and does not count as two.
    rows = [[1.0] * 20, [2.0] * 10, [4.0] * 10]
    apart = [20 * (1 - 2), 10 * (2 - 2), 10 * (4 - 2)]
    error = (3 / 2 * sum(x * x for x in apart)) ** 0.5 / 40
    assert intervals.of_means(rows) == pytest.approx((2 - 4.303 * error, 2 + 4.303 * error))
    assert intervals.of_means([[1.0, 2.0]]) == (None, None)


@pytest.mark.parametrize(("documents", "quantile"), [(12, 2.201), (31, 2.042), (201, 1.972)])
def test_students_t_beyond_the_table(documents: int, quantile: float) -> None:
    rows = [[float(i % 2)] for i in range(documents)]
    mean = sum(r[0] for r in rows) / documents
    error = (sum((r[0] - mean) ** 2 for r in rows) / documents / (documents - 1)) ** 0.5
    low, _ = intervals.of_means(rows)
    assert low is not None
    assert (mean - low) / error == pytest.approx(quantile, abs=5e-4)
