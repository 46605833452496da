"""The arithmetic of KVCrush in Triton, as torch does it, to the bit, in guarded memory.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_device import guarded, kernel, on_device, randoms

from minikv.kernels.torch import crush as plain_torch

pytest.importorskip("triton", reason="no Triton on this system")

HEADS = 3


def some(seed: int, *shape: int) -> Tensor:
    """bool: about half of them."""
    return torch.rand(shape, generator=randoms(seed)) < 0.5


@on_device
@pytest.mark.parametrize(("rows", "bits"), [(1, 1), (40, 4), (1300, 1), (1030, 3)])
def test_candidates_by_their_distance(rows: int, bits: int) -> None:
    """Heads hold some of the same positions, in any order."""
    pos = torch.stack([torch.randperm(rows + 5, generator=randoms(h))[:rows] for h in range(HEADS)])
    pos[:, 2::5] = -1
    free = some(1, HEADS, rows) & (pos >= 0)
    chosen, goal = free & some(2, HEADS, rows), some(4, HEADS, bits)
    marks = free[:, None] & some(3, HEADS, bits, rows)
    given = marks, goal, pos, free, chosen
    want = plain_torch.crush_keys(*given, rows + 5)
    got = kernel("triton.crush").crush_keys(*map(guarded, given), rows + 5)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine.cpu(), theirs)


@on_device
@pytest.mark.parametrize("how", ["ends", "step"])
@pytest.mark.parametrize(
    ("rows", "left", "count"),
    [
        (40, (0, 7, 40), (3, 9, 11)),
        (40, (30, 30, 9), (0, 1, 9)),
        (2100, (2000, 1999, 3), (1100,) * 3),
    ],
)
def test_representatives(
    how: str, rows: int, left: tuple[int, ...], count: tuple[int, ...]
) -> None:
    """Of no candidates, of fewer than are asked for, of as many and of more."""
    order = torch.stack([torch.randperm(rows, generator=randoms(h)) for h in range(HEADS)])
    want = torch.zeros((HEADS, rows), dtype=torch.bool)
    for h in range(HEADS):  # what was chosen before is no candidate
        want[h, order[h, left[h] :: 3]] = True
    before, got = want.clone(), guarded(want)
    numbers = torch.tensor(left), torch.tensor(count)
    plain_torch.represent(want, order, *numbers, how, max(count))
    kernel("triton.crush").represent(got, guarded(order), *map(guarded, numbers), how, max(count))
    assert torch.equal(got.cpu(), want)
    added = want & ~before
    assert added.sum(1).tolist() == [min(a, b) for a, b in zip(left, count, strict=True)]
    for h in range(HEADS):
        assert bool(added[h, order[h, : left[h]]].sum() == added[h].sum())
