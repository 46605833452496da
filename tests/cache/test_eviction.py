"""Policies that evict several rows of a head at once: which rows leave, when that is known, and
that the others stay side by side."""

from __future__ import annotations

import torch

from minikv.cache.eviction import close_gaps, leaving


def test_gaps_are_closed_in_every_column() -> None:
    """Head 0 loses rows 1 and 4 of 5, head 1 none of 3; what stays is side by side."""
    values = torch.arange(20.0).view(10, 2)
    columns = [torch.arange(10), values.clone()]
    index = torch.tensor([[0, 1, 2, 3, 4], [6, 7, 8, 8, 8]])
    gone = torch.zeros(2, 5, dtype=torch.bool)
    gone[0, [0, 2]] = True
    close_gaps(columns, index, gone, torch.tensor([5, 3]), torch.tensor([4, 8]), 2)
    assert sorted(columns[0][:3].tolist()) == [1, 3, 4]
    assert columns[0][5:].tolist() == [*range(5, 10)]
    assert torch.equal(columns[1], values[columns[0]])  # of the same rows


def test_the_lowest_scores_leave_of_equal_ones_the_oldest() -> None:
    inf = torch.inf
    scores = torch.tensor([[0.5, 0.2, 0.2, inf, 0.1], [inf, inf, 3.0, inf, inf]])
    pos = torch.tensor([[4, 9, 2, 0, 7], [1, 2, 3, 4, 5]])
    gone = leaving(scores, pos, torch.tensor([2, 3]))
    assert gone.tolist() == [[False, False, True, False, True], [False, False, True, False, False]]
