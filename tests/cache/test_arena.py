"""The storage: a wider copy holds the same."""

from __future__ import annotations

import itertools

import pytest
import torch
from layouts import HEADS, filled, segment


def test_a_wider_copy_holds_the_same() -> None:
    old = filled([60, 90], [[6, 0, 20], [3, 4, 5]], torch.int8)
    old.free_slot[1, 1] = old.start[1, 1] + 2
    wide = old.grown(old.capacity + torch.tensor([[0, 3, 1], [7, 0, 2]]))
    assert wide.capacity.tolist() == [[20, 23, 21], [37, 30, 32]]
    for layer, h in itertools.product(range(2), range(HEADS)):
        for name in old.columns:
            assert torch.equal(segment(wide, name, layer, h), segment(old, name, layer, h))
    assert (wide.free_slot == -1).sum() == 5
    assert int(wide.free_slot[1, 1]) == int(wide.start[1, 1]) + 2
    assert wide.region == [0, 64, 163]
    with pytest.raises(AssertionError):
        old.grown(torch.full_like(old.capacity, 5))


def test_an_arena_takes_anothers_rows_where_it_has_its_shape() -> None:
    """Its own columns and tables hold them, at the addresses that they had."""
    lengths = [[6, 0, 20], [3, 4, 5]]
    mine, other = filled([60, 90], [[1, 1, 1], [1, 1, 1]], None), filled([60, 90], lengths, None)
    other.free_slot[1, 1] = 70
    other.columns["k"].add_(0.5)
    before = {name: column.data_ptr() for name, column in mine.columns.items()}
    tables = ("start", "length", "capacity", "cap", "free_slot")
    assert mine.take(other)
    for name, column in mine.columns.items():
        assert column.data_ptr() == before[name] != other.columns[name].data_ptr()
        assert torch.equal(column, other.columns[name])
    for name in tables:
        assert torch.equal(getattr(mine, name), getattr(other, name))
        assert getattr(mine, name).data_ptr() != getattr(other, name).data_ptr()
    # Columns that are the same memory already are left alone.
    shared = mine.sharing({"sum": torch.float32})
    shared.columns["sum"].fill_(2.0)
    shared.length[0, 0] = 9
    assert mine.take(shared)
    assert int(mine.length[0, 0]) == 9
    assert bool((mine.columns["sum"] == 2.0).all())


def test_an_arena_of_another_shape_is_not_taken() -> None:
    mine, lengths = filled([60, 90], [[1, 1, 1], [1, 1, 1]], None), [[6, 0, 20], [3, 4, 5]]
    others = [filled([60, 93], lengths, None), filled([60, 90], lengths, torch.int8)]
    others.append(mine.sharing({"sum": torch.float32, "count": torch.float32}))
    for other in (*others, mine.sharing({"sum": torch.float64})):
        other.length.fill_(5)
        assert not mine.take(other)
    assert mine.length.tolist() == [[1, 1, 1], [1, 1, 1]]


def test_segments_that_were_just_laid_hold_nothing() -> None:
    arena = filled([60, 90], [[6, 0, 20], [3, 4, 5]], None)
    arena.free_slot.fill_(7)
    arena.lay(torch.tensor([[10, 20, 30], [40, 0, 50]]))
    assert arena.start.tolist() == [[0, 10, 30], [60, 100, 100]]
    assert arena.capacity.tolist() == [[10, 20, 30], [40, 0, 50]]
    assert (arena.length == 0).all()
    assert (arena.free_slot == -1).all()
