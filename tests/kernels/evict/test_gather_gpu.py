"""Moving the rows that stay, in Triton, as torch moves them, in guarded memory.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

import pytest
import torch
from triton_device import draw, guarded, kernel, on_device, randoms

from minikv.kernels.evict import plain as plain_torch

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
    gather = kernel("evict.gather_gpu")
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
