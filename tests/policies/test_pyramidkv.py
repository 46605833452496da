"""PyramidKV's exact line, worked by hand; those of the releases are in test_fixtures.py."""

from __future__ import annotations

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
