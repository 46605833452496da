"""How many rows each head keeps, and which, in Triton, as in torch, in guarded memory.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_device import guarded, kernel, on_device, randoms

from minikv.kernels.evict import plain as plain_torch

pytest.importorskip("triton", reason="no Triton on this system")


def same(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    assert torch.equal(got.cpu(), want)


@on_device
@pytest.mark.parametrize(("heads", "rows", "early"), [(1, 1, 1), (3, 70, 0), (5, 4100, 900)])
def test_rows_of_each_head(heads: int, rows: int, early: int) -> None:
    made = kernel("evict.heads_gpu")
    pos = torch.stack([torch.randperm(2 * rows, generator=randoms(h))[:rows] for h in range(heads)])
    pos[:, 2::5] = -1
    for sinks, young, pinned in ((0, 2 * rows, 0), (4, rows, 0), (2, rows, rows // 2)):
        want = plain_torch.divide(pos, sinks, young, pinned)
        for got, one in zip(made.divide(guarded(pos), sinks, young, pinned), want, strict=True):
            same(got, one)
    keep = torch.rand((heads, rows), generator=randoms(9)) < 0.6
    keep[0], keep[-1] = True, heads == 1
    order = pos[:, :early].argsort(dim=1, stable=True)
    index, count = made.survivors(guarded(keep), guarded(order))
    want_index, want_count = plain_torch.survivors(keep, order)
    same(count, want_count)
    for h, n in enumerate(want_count.tolist()):
        assert torch.equal(index[h, :n].cpu(), want_index[h, :n])


@on_device
@pytest.mark.parametrize("seed", range(12))
def test_counts_of_heads(seed: int) -> None:
    """Shares with and without room for them, least counts that heads can and cannot reach, and
    segments whose caps and sizes are raised or not."""
    made, source = kernel("evict.heads_gpu"), randoms(seed)
    heads = (1, 2, 8, 33)[seed % 4]

    def numbers(most: int) -> Tensor:
        return torch.randint(most, (heads,), generator=source)

    need, most, parts = numbers(40), numbers(60), 5 * heads
    total = need.sum()
    for times, even in ((4 * heads, 1), (parts, 0), (0, 5)):
        given = need, times, even, parts, most, total
        there = guarded(need), times, even, parts, guarded(most), guarded(total)
        same(made.share(*there), plain_torch.share(*given))
    counts, sure = numbers(12), numbers(3)
    free = counts + numbers(9)
    for least in (0, 1, 7, 40):
        want = plain_torch.ensure_least(counts, sure, free, least)
        same(made.ensure_least(*map(guarded, (counts, sure, free)), least), want)
    for room in (
        (0, -1, 0, -1),
        (9, -1, 2, -1),
        (0, int(counts.sum()) + 20, 1, -1),
        (0, 0, 3, 900),
    ):
        tables = [torch.full((heads,), 99) for _ in range(5)]
        there = [guarded(t) for t in tables]
        plain_torch.lay_out(counts, 40, tuple(tables), *room)
        made.lay_out(guarded(counts), 40, tuple(there), *room)
        for got, want in zip(there, tables, strict=True):
            same(got, want)
