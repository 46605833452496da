"""PyramidKV's lines, worked by hand; more of the releases' are in test_fixtures.py."""

from __future__ import annotations

import random

from tables import table

from minikv.policies.pyramidkv import PyramidKV

LINES = """
given                 | rows
# The last layer has the mean divided by beta. A mean of 40 outside the window: the last layer has
# 40 / 4, the first 80 - 10.
exact exact 4       5 48 4096 0 8     | 78 63 48 33 18
exact exact 20      5 40 4096 0 0     | 78 59 40 21 2
exact exact 1       5 40 4096 0 0     | 40 40 40 40 40
# From 71.75 by 20.5 to 10.25: two layers are rounded up, those with most left over.
exact exact 4       4 41 4096 0 0     | 72 51 31 10
# From 79.2 by 39.2 to 0.8: the last layer gets the row that is left.
exact exact 50      3 40 4096 0 0     | 79 40 1
# The first layer holds 60 at most: from 60 to 20. The last needs 15: from 65 to 15.
exact exact 4       5 40 60 0 0       | 60 50 40 30 20
exact exact 4       3 40 4096 15 0    | 65 40 15
# `rounding=official`, which is Ada-KV's too, is the `line` of its release, and only where no other
# line was asked for.
exact official 20   4 200 300 1 8     | 300 234 168 102
official exact 20   4 200 300 1 8     | 300 234 168 102
factory official 20 4 200 300 1 8     | 200 200 200 200
# Twice the mean of 192 outside the window, and less.
factory official 20 4 200 383 1 8     | 200 200 200 200
factory official 20 4 200 384 1 8     | 383 261 139 17
# By whole steps: means of one row and of none outside a window of 8.
official exact 20   3 9 4096 0 8      | 10 9 8
official exact 20   3 8 4096 0 8      | 8 8 8
official exact 20   1 9 4096 0 8      | 9
# Of 60 rows outside the window there is a line to 20 less, of one more than the mean to one less,
# and of the mean none. The first layer would have 78, and 77 is room for.
official exact 20   3 48 68 0 8       | 68 48 28
official exact 20   3 48 49 0 8       | 49 48 47
official exact 20   3 48 48 0 8       | 48 48 48
official exact 20   3 48 85 0 8       | 85 48 11
# kvpress counts the window on the line: from 2 * 40 - 40 / 4 to 40 / 4; even where the last layer
# would have less than the window.
kvpress exact 4     3 40 4096 1 10    | 70 40 10
kvpress exact 4     3 40 80 1 10      | 70 40 10
kvpress exact 4     3 40 79 1 10      | 69 40 11
kvpress exact 4     3 40 4096 1 11    | 40 40 40
kvpress exact 4     1 40 4096 1 8     | 40
# The first layer holds all that there is.
kvpress exact 4     3 40 70 1 0       | 70 40 10
"""
"""line, rounding and beta; layers, budget, most, least and window | the rows of each layer."""


@table(LINES)
def test_lines_by_hand(given: str, rows: str) -> None:
    line, rounding, *numbers = given.split()
    beta, layers, budget, *limits = map(int, numbers)
    found = PyramidKV(beta=beta, line=line, rounding=rounding).rows(layers, budget, *limits)
    assert found == [*map(int, rows.split())]
    if (line, rounding) == ("exact", "exact"):
        assert sum(found) == layers * budget


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
