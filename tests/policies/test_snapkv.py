"""SnapKV: pooling over neighbours in the text."""

from __future__ import annotations

import pytest
import torch

from minikv.policies.selection import pool


def test_pooling_is_over_neighbours_in_the_text() -> None:
    """Rows in any order of slots; the window's rows take no part."""
    pos = torch.tensor([[4, 0, 2, 1, 3, 9]])
    scores = torch.tensor([[0.0, 5.0, 1.0, 2.0, 3.0, 99.0]])
    free = pos < 9
    pooled = pool(scores, pos, free, 3, "max")
    assert pooled[0].tolist() == [3.0, 5.0, 3.0, 5.0, 3.0, float("-inf")]
    mean = pool(scores, pos, free, 3, "avg")
    assert mean[0, :5].tolist() == pytest.approx([1.0, 7 / 3, 2.0, 8 / 3, 4 / 3])
