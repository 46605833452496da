"""The end of a prompt: what stays is written to another arena, and the old one is as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layouts import HEADS, SIZE, filled, random, segment

from minikv.cache.compaction import Room, append_rows, gather_survivors
from minikv.kernels.dispatch import Kernels


@pytest.mark.parametrize("kv", [None, torch.int8])
@pytest.mark.parametrize("before", [0, 7])
def test_survivors_are_copied_in_the_order_of_positions(
    before: int, kv: torch.dtype | None
) -> None:
    """Against one row at a time, by position; for heads that keep all, some and nothing."""
    old = filled([60, 60], [[7, 4, 6]] * 2, kv)
    old.free_slot[1, 2] = old.start[1, 2] + 3
    index, live = old.index(1, before)
    tokens = 9
    pos = torch.stack([torch.randperm(20, generator=random(h))[:before] for h in range(HEADS)])
    pos = pos.masked_fill(~live, -1)
    new = torch.arange(20, 20 + tokens).expand(HEADS, tokens)
    pos = torch.cat((pos, new), 1)
    keep = (torch.rand(pos.shape, generator=random(5)) < 0.6) & (pos >= 0)
    keep[0], keep[2] = pos[0] >= 0, False
    target = old.fresh([30, 60], {"sum": torch.float32})
    staged = old.stored(Kernels(), *torch.randn(2, HEADS, tokens, SIZE, generator=random(6)))
    extra = {"sum": torch.rand(pos.shape, generator=random(7))}
    caps = keep.sum(1).clamp(min=5)
    sizes = caps + 2
    earlier = (old, index) if before else None
    room = Room(floor=5, spare=2)
    gather_survivors(Kernels(), target, 1, keep, pos, room, staged, extra, earlier)
    begin = 30
    for h in range(HEADS):
        rows = sorted(keep[h].nonzero().flatten().tolist(), key=lambda i: int(pos[h, i]))
        assert int(target.start[1, h]) == begin
        assert int(target.length[1, h]) == len(rows)
        for place, i in enumerate(rows, begin):
            assert int(target.columns["pos"][place]) == int(pos[h, i])
            assert target.columns["sum"][place] == extra["sum"][h, i]
            for name in ("k", "v", *target.scales):
                was = old.columns[name][index[h, i]] if i < before else staged[name][h, i - before]
                assert torch.equal(target.columns[name][place], was), name
        begin += int(sizes[h])
    assert target.capacity[1].tolist() == sizes.tolist()
    assert target.cap[1].tolist() == caps.tolist()
    assert target.free_slot[1].tolist() == [-1] * HEADS


@pytest.mark.parametrize(
    ("room", "caps", "sizes"),
    [
        (Room(), [7, 0, 2], [7, 0, 2]),
        (Room(floor=3, spare=1), [7, 3, 3], [8, 4, 4]),
        (Room(total=13, spare=2), [7, 3, 3], [9, 5, 5]),
        (Room(total=0), [7, 0, 2], [7, 0, 2]),
        (Room(spare=1, all=30), [7, 0, 2], [10, 10, 10]),
    ],
)
def test_how_segments_are_laid_out(room: Room, caps: list[int], sizes: list[int]) -> None:
    tables = tuple(torch.full((HEADS,), 99) for _ in range(5))
    numbers = room.floor, room.total, room.spare, room.all
    Kernels().lay_out(torch.tensor([7, 0, 2]), 40, tables, *numbers)
    start = [40, 40 + sizes[0], 40 + sizes[0] + sizes[1]]
    assert [t.tolist() for t in tables] == [start, [7, 0, 2], sizes, caps, [-1] * HEADS]


@pytest.mark.parametrize("kv", [None, torch.int8])
def test_rows_are_written_behind_those_that_stay(kv: torch.dtype | None) -> None:
    """In memory that both arenas share; the old one holds what it held."""
    old = filled([60, 90], [[6] * HEADS] * 2, kv)
    held = {n: [segment(old, n, 1, h).clone() for h in range(HEADS)] for n in old.columns}
    target = old.sharing({"sum": torch.float32})
    assert target.columns["k"] is old.columns["k"]
    assert target.columns["sum"] is not old.columns["sum"]
    tokens = 5
    pos = torch.cat((old.columns["pos"][old.index(1)[0]], torch.arange(50, 55).expand(3, 5)), 1)
    staged = old.stored(Kernels(), *torch.randn(2, HEADS, tokens, SIZE, generator=random(6)))
    extra = {"sum": torch.rand(pos.shape, generator=random(7))}
    append_rows(Kernels(), target, 1, pos, torch.tensor([8, 9, 10]), staged, extra)
    for h in range(HEADS):
        for name, was in held.items():
            assert torch.equal(segment(old, name, 1, h), was[h])
            if name != "sum":
                assert torch.equal(segment(target, name, 1, h)[:6], was[h])
        for name in ("k", "v", *old.scales):
            assert torch.equal(segment(target, name, 1, h)[6:], staged[name][h])
        assert segment(target, "pos", 1, h)[6:].tolist() == [*range(50, 55)]
        assert torch.equal(segment(target, "sum", 1, h), extra["sum"][h])
    assert old.length[1].tolist() == [6] * HEADS
    assert target.length.tolist() == [[6] * HEADS, [11] * HEADS]
    assert target.cap[1].tolist() == [8, 9, 10]


class Bounded(Kernels):
    """Kernels that say how many rows of a head they were told to expect at the most."""

    def __init__(self) -> None:
        self.most: list[int] = []

    def gather_rows(self, *given: Any) -> None:
        self._gather("gather_rows", *given)

    def gather_columns(self, *given: Any) -> None:
        self._gather("gather_columns", *given)

    def _gather(self, name: str, *given: Any) -> None:
        assert int(given[1].max()) <= given[-1]
        self.most.append(given[-1])
        getattr(super(), name)(*given)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_kernels_are_told_of_no_more_rows_than_the_layer_has_room_for(layer: int) -> None:
    """What they launch is as large; of a prompt of 30 tokens, too."""
    like, ops, regions = filled([9, 9, 9], [[0] * 3] * 3, None), Bounded(), [21, 12, 200]
    target = like.fresh(regions, {})
    pos = torch.arange(30).expand(HEADS, 30)
    staged = like.stored(Kernels(), *torch.randn(2, HEADS, 30, SIZE, generator=random(6)))
    gather_survivors(ops, target, layer, pos < 4, pos, Room(), staged, {})
    assert {*ops.most} == {min(30, regions[layer])}
    assert target.length[layer].tolist() == [4] * HEADS
