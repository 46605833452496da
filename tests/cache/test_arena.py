"""The storage: a wider copy holds the same."""

from __future__ import annotations

import itertools

import pytest
import torch
from layouts import HEADS, filled


def test_a_wider_copy_holds_the_same() -> None:
    old = filled([60, 90], [[6, 0, 20], [3, 4, 5]], torch.int8)
    old.free_slot[1, 1] = old.start[1, 1] + 2
    wide = old.grown(old.capacity + torch.tensor([[0, 3, 1], [7, 0, 2]]))
    assert wide.capacity.tolist() == [[20, 23, 21], [37, 30, 32]]
    for layer, h in itertools.product(range(2), range(HEADS)):
        for name in old.columns:
            assert torch.equal(wide.segment(name, layer, h), old.segment(name, layer, h))
    assert (wide.free_slot >= 0).sum() == 1
    assert int(wide.free_slot[1, 1]) == int(wide.start[1, 1]) + 2
    assert wide.region == [0, 64, 163]
    with pytest.raises(AssertionError):
        old.grown(torch.full_like(old.capacity, 5))
