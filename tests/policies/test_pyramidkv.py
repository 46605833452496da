"""PyramidKV's exact line, worked by hand; those of the releases are in test_fixtures.py."""

from __future__ import annotations

import random

import pytest

from minikv.policies.pyramidkv import PyramidKV


@pytest.mark.parametrize(
    ("beta", "layers", "budget", "window", "rows"),
    [
        # A mean of 40 outside the window: the last layer has 40 / 4, the first 80 - 10.
        (4, 5, 48, 8, [78, 63, 48, 33, 18]),
        (20, 5, 40, 0, [78, 59, 40, 21, 2]),
        (1, 5, 40, 0, [40] * 5),
        # From 71.75 by 20.5 to 10.25: two layers are rounded up, those with most left over.
        (4, 4, 41, 0, [72, 51, 31, 10]),
        # From 79.2 by 39.2 to 0.8: the last layer gets the row that is left.
        (50, 3, 40, 0, [79, 40, 1]),
    ],
)
def test_the_last_layer_has_the_mean_over_beta(
    beta: int, layers: int, budget: int, window: int, rows: list[int]
) -> None:
    policy = PyramidKV(beta=beta, line="exact", rounding="exact")
    assert policy.rows(layers, budget, 4096, 0, window) == rows
    assert sum(rows) == layers * budget


def test_no_layer_gets_more_than_there_is_nor_less_than_it_needs() -> None:
    """The first layer holds 60 at most: from 60 to 20. The last needs 15: from 65 to 15."""
    policy = PyramidKV(beta=4, line="exact", rounding="exact")
    assert policy.rows(5, 40, 60, 0, 0) == [60, 50, 40, 30, 20]
    assert policy.rows(3, 40, 4096, 15, 0) == [65, 40, 15]


def test_one_word_for_both_releases_is_their_line() -> None:
    """`rounding=official`, which is Ada-KV's too, is the `line` of its release, and only where no
    other line was asked for."""
    both = PyramidKV(beta=20, line="exact", rounding="official")
    line = PyramidKV(beta=20, line="official", rounding="exact")
    factory = PyramidKV(beta=20, line="factory", rounding="official")
    given = 4, 200, 300, 1, 8
    assert both.rows(*given) == line.rows(*given) == [300, 234, 168, 102]
    assert factory.rows(*given) == [200] * 4
    assert factory.rows(4, 200, 383, 1, 8) == [200] * 4  # less than twice the mean of 192
    assert factory.rows(4, 200, 384, 1, 8)[0] == 383


def test_kvpress_counts_the_window_on_the_line() -> None:
    """From 2 * 40 - 40 / 4 to 40 / 4; even where the last layer would have less than the window."""
    policy = PyramidKV(beta=4, line="kvpress", rounding="exact")
    assert policy.rows(3, 40, 4096, 1, 10) == [70, 40, 10]
    assert policy.rows(3, 40, 80, 1, 10) == [70, 40, 10]
    assert policy.rows(3, 40, 79, 1, 10) == [69, 40, 11]
    assert policy.rows(3, 40, 4096, 1, 11) == [40] * 3
    assert policy.rows(1, 40, 4096, 1, 8) == [40]
    assert policy.rows(3, 40, 70, 1, 0) == [70, 40, 10]  # the first layer holds all that there is


def test_the_line_falls_and_is_the_budget_to_the_row() -> None:
    """Whatever is given: no layer has more than the one before or than there is, none less than it
    needs; with two layers or more the first has more than the last where anything is left over."""
    draw = random.Random(0)
    for _ in range(2000):
        layers, window = draw.randint(1, 9), draw.choice((0, 3, 8))
        least, beta = window + draw.randint(0, 3), draw.randint(2, 40)
        budget = draw.randint(max(least, window + 1), 90)
        most = draw.randint(budget, 300)
        policy = PyramidKV(beta=beta, line="exact", rounding="exact")
        rows = policy.rows(layers, budget, most, least, window)
        assert sum(rows) == layers * budget
        assert rows == sorted(rows, reverse=True)
        assert most >= rows[0]
        assert rows[-1] >= max(least, window + 1)
        room = min(budget - max(least, window + 1), most - budget)
        if layers > 1 and room >= 2:
            assert rows[0] > rows[-1]


def test_a_mean_of_one_row_still_falls_and_a_mean_of_none_does_not() -> None:
    """Outside a window of 8, by the releases' whole steps: 2, 1, 0 rows, or the window alone."""
    policy = PyramidKV(beta=20, line="official", rounding="exact")
    assert policy.rows(3, 9, 4096, 0, 8) == [10, 9, 8]
    assert policy.rows(3, 8, 4096, 0, 8) == [8, 8, 8]
    assert policy.rows(1, 9, 4096, 0, 8) == [9]


def test_the_first_layer_gets_no_more_rows_than_there_are() -> None:
    """Of 60 rows outside the window there is a line to 20 less, of one more than the mean to one
    less, and of the mean none."""
    policy = PyramidKV(beta=20, line="official", rounding="exact")
    assert policy.rows(3, 48, 68, 0, 8) == [68, 48, 28]
    assert policy.rows(3, 48, 49, 0, 8) == [49, 48, 47]
    assert policy.rows(3, 48, 48, 0, 8) == [48, 48, 48]
