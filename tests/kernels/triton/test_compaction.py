"""Moving the rows that stay, in Triton, as torch moves them, in guarded memory.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

import pytest
import torch
from triton_device import draw, guarded, kernel, on_device, randoms, untouched

from minikv.kernels.torch import compaction as plain_torch

pytest.importorskip("triton", reason="no Triton on this system")


@on_device
@pytest.mark.parametrize("size", [80, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("before", [0, 37])
def test_survivors_move_into_segments(size: int, dtype: torch.dtype, before: int) -> None:
    """Every row to its place; whatever lies between the segments stays as it is."""
    heads, tokens = 4, 63
    fresh = draw(1, (heads, tokens, size), dtype), draw(2, (heads, tokens, size), dtype)
    old = draw(3, (heads * before + 2, size), dtype), draw(4, (heads * before + 2, size), dtype)
    at = torch.randperm(heads * before + 2, generator=randoms(5))[: heads * before]
    at = at.view(heads, before)
    keep = torch.rand((heads, before + tokens), generator=randoms(6)) < 0.6
    keep[1], keep[2] = False, True
    pos = torch.stack(
        [
            torch.cat((torch.randperm(before, generator=randoms(h)), before + torch.arange(tokens)))
            for h in range(heads)
        ]
    )
    order = pos[:, :before].argsort(1)
    index, count = plain_torch.survivors(keep, order)
    for h in range(heads):
        assert pos[h, index[h, : count[h]]].tolist() == sorted(pos[h, keep[h]].tolist())
    there, counted = kernel("triton.compaction").survivors(guarded(keep), guarded(order))
    assert torch.equal(counted.cpu(), count)
    for h in range(heads):
        assert torch.equal(there[h, : count[h]].cpu(), index[h, : count[h]])
    start = torch.cumsum(count + 2, 0) - count
    total = int(start[-1] + count[-1]) + 3
    into = [guarded(torch.full((total, size), 7.0, dtype=dtype)) for _ in range(2)]
    places = guarded(torch.full((total,), 7, dtype=torch.int32))
    column = guarded(torch.full((total,), 7, dtype=torch.int32))
    scores = draw(9, tuple(pos.shape), torch.float32)
    score = guarded(torch.full((total,), 7.0))
    want = [t.clone().cpu() for t in (*into, places, column, score)]
    lists = [guarded(t) for t in (index, count, start)]
    source = None if not before else (guarded(old[0]), guarded(old[1]), guarded(at))
    gather = kernel("triton.compaction")
    staged = guarded(fresh[0]), guarded(fresh[1])
    most = before + tokens
    gather.gather_rows(*lists, staged, source, tuple(into), (guarded(pos), places), most)
    gather.gather_columns(*lists, [guarded(pos), guarded(scores)], [column, score], most)
    earlier = (*old, at) if before else None
    plain_torch.gather_rows(
        index, count, start, fresh, earlier, (want[0], want[1]), (pos, want[2]), 100
    )
    plain_torch.gather_columns(index, count, start, [pos, scores], want[3:], 100)
    assert torch.equal(want[2], want[3])
    for got, expected in zip((*into, places, column, score), want, strict=True):
        assert torch.equal(got.cpu(), expected)
    # The twin itself, written out.
    for h in range(heads):
        rows = [
            old[0][at[h, r]] if r < before else fresh[0][h, r - before]
            for r in index[h, : count[h]].tolist()
        ]
        begin = int(start[h])
        for r, row in enumerate(rows):
            assert torch.equal(want[0][begin + r], row)
    assert bool((want[0][: int(start[0])] == 7).all())


@on_device
@pytest.mark.parametrize("heads", [1, 5, 8])
@pytest.mark.parametrize(
    "room", [(0, -1, 3, -1), (4, -1, 1, -1), (0, 90, 2, -1), (0, -1, 0, 200), (0, 70, 1, 150)]
)
def test_segments_are_laid_out(heads: int, room: tuple[int, int, int, int]) -> None:
    count = torch.randint(0, 12, (heads,), generator=randoms(heads))
    want = [torch.full((heads,), 99) for _ in range(5)]
    got = [guarded(t) for t in want]
    plain_torch.lay_out(count, 70, tuple(want), *room)
    kernel("triton.compaction").lay_out(guarded(count), 70, tuple(got), *room)
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine.cpu(), theirs)
        assert untouched(mine)


@on_device
@pytest.mark.parametrize("most", [0, 9, 1100])
def test_the_rows_that_heads_hold(most: int) -> None:
    start, length = torch.tensor([3, 3 + most, 5]), torch.tensor([most, max(0, most - 4), 0])
    free_slot = torch.tensor([3 + most // 2, -1, -1])
    pos = torch.randint(0, 5000, (3 * most + 2,), generator=randoms(1), dtype=torch.int32)
    want = plain_torch.held_rows(start, length, free_slot, pos, most)
    given = [guarded(t) for t in (start, length, free_slot, pos)]
    got = kernel("triton.compaction").held_rows(*given, most)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine.cpu(), theirs)
