"""SnapKV: pooling over neighbours in the text."""

from __future__ import annotations

import pytest
import torch

from minikv.policies.selection import order_of, pool


def test_pooling_is_over_neighbours_in_the_text() -> None:
    """Rows in any order of slots; the window's rows take no part. Those at the end may be known to
    be in order."""
    pos = torch.tensor([[4, 0, 2, 1, -1, 5, 9]])
    scores = torch.tensor([[0.0, 5.0, 1.0, 2.0, 99.0, 3.0, 99.0]])
    free = (pos >= 0) & (pos < 9)
    for early in (5, 6, 7):
        order = order_of(pos[:, :early])
        pooled = pool(scores, order, free, 3, "max")[0, [0, 1, 2, 3, 5]]
        assert pooled.tolist() == [3.0, 5.0, 2.0, 5.0, 3.0]
        mean = pool(scores, order, free, 3, "avg")[0]
        assert mean[[0, 1, 2, 3, 5]].tolist() == pytest.approx([4 / 3, 7 / 3, 1.0, 8 / 3, 1.0])
        assert mean[[4, 6]].tolist() == [float("-inf")] * 2
