"""Choosing and moving the rows of a prompt that is read in blocks, in Triton, as torch does it, to
the bit, in guarded memory.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

import math

import pytest
import step_oracle
import torch
from torch import Tensor
from triton_device import draw, guarded, kernel, on_device, randoms

from minikv.kernels.torch import blocks as plain_torch

pytest.importorskip("triton", reason="no Triton on this system")

TILE = 64  # smaller than a real one, so that heads have several


def positions(heads: int, count: int, seed: int) -> Tensor:
    """Ascending positions, with holes; one head has few rows."""
    pos = torch.arange(count).mul(2).expand(heads, count).clone()
    gone = torch.rand(pos.shape, generator=randoms(seed)) < 0.2
    gone[0, 3:] |= torch.rand(count, generator=randoms(seed + 1))[3:] < 0.5
    return pos.masked_fill(gone, -1)


def same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(got[1].cpu(), want[1])
    for h, n in enumerate(want[1].tolist()):
        assert torch.equal(got[0][h, :n].cpu(), want[0][h, :n]), h


@on_device
@pytest.mark.parametrize(("heads", "count"), [(1, 1), (3, 40), (5, 150)])
def test_the_lowest_rows_leave(heads: int, count: int) -> None:
    """Scores with many ties, of both signs."""
    pos = positions(heads, count, 1)
    live = (pos >= 0).sum(1)
    scores = draw(2, (heads, count), torch.float32).mul(3).round() / 3
    scores[:, ::7], scores[:, 3::7], scores[:, 4::9] = 0.0, -0.0, -math.inf
    scores[:, ::5] = torch.finfo(torch.float32).max
    free = (torch.rand((heads, count), generator=randoms(3)) < 0.7) & (pos >= 0)
    scores[:, 2::11] = scores[:, 2::11].masked_fill(~free[:, 2::11], math.nan)
    made = kernel("triton.blocks")
    there = [guarded(t) for t in (scores, free, pos, live)]
    for limit in (-2, 0, 1, count // 3, int(live.min()), int(live.max()), 2 * count):
        want = plain_torch.lowest_block(scores, free, pos, live, limit)
        same(made.lowest_block(*there, limit, block=TILE), want)
        given = (live - limit).clamp(min=0)
        assert torch.equal(want[1], live - torch.minimum(given, free.sum(1)))


@on_device
@pytest.mark.parametrize("some", [False, True])
def test_rows_leave_whose_score_is_nan(some: bool) -> None:
    """After those with numbers; else more rows would stay than there is room for."""
    pos = torch.arange(40).expand(2, 40).contiguous()
    live, free = torch.full((2,), 40), torch.ones(2, 40, dtype=torch.bool)
    scores = draw(2, (2, 40), torch.float32)
    scores[:, 10 if some else 0 :] = math.nan
    made = kernel("triton.blocks")
    there = [guarded(t) for t in (scores, free, pos, live)]
    for limit in (0, 5, 33):
        want = plain_torch.lowest_block(scores, free, pos, live, limit)
        assert want[1].tolist() == [limit, limit]
        same(made.lowest_block(*there, limit, block=TILE), want)
    layout, rest = (guarded(pos), guarded(live)), (5, 41, 0, 1, 0)
    columns = [guarded(scores)] * 3
    quota = guarded(torch.full((2,), 20))
    assert made.unprotected_block(columns[0], *layout, *rest, block=TILE)[1].tolist() == [5, 5]
    assert made.h2o_block(columns[0], quota, *layout, *rest, block=TILE)[1].tolist() == [5, 5]
    assert made.roco_block(*columns, quota, *layout, *rest, block=TILE)[1].tolist() == [5, 5]


@on_device
@pytest.mark.parametrize(
    ("heads", "count", "protected"),
    [
        (1, 1, (0, 1, 0)),
        (3, 40, (4, 10, 0)),
        (3, 150, (4, 10, 0)),
        (5, 70, (0, 1, 20)),
        (2, 70, (2, 1000, 6)),
    ],
)
def test_policies_choose_as_torch_does(
    heads: int, count: int, protected: tuple[int, int, int]
) -> None:
    """Also where everything is protected, and where heads hold different numbers of rows."""
    pos, position = positions(heads, count, 4), 2 * count + 1
    live = (pos >= 0).sum(1)
    sums = draw(5, (heads, count), torch.float32).abs().mul(8).round() / 8
    counts = torch.randint(0, 9, (heads, count), generator=randoms(6)).float()
    squares = sums.square() * draw(7, (heads, count), torch.float32).abs()
    squares[:, ::3] = 0.0
    made = kernel("triton.blocks")
    given = [guarded(t) for t in (sums, squares, counts)]
    layout = guarded(pos), guarded(live)
    most = int(live.max())
    for limit, wanted in ((0, 9), (count // 3, 1), (count // 2, count // 4 + 1), (most - 1, 999)):
        quota = torch.full((heads,), wanted)
        rest = limit, position, *protected
        want = step_oracle.h2o_block(sums, quota, pos, live, *rest)
        got = made.h2o_block(given[0], guarded(quota), *layout, *rest, block=TILE)
        same(got, want)
        want = step_oracle.unprotected_block(sums, pos, live, *rest)
        same(made.unprotected_block(given[0], *layout, *rest, block=TILE), want)
        want = step_oracle.roco_block(sums, squares, counts, quota, pos, live, *rest)
        got = made.roco_block(*given, guarded(quota), *layout, *rest, block=TILE)
        same(got, want)


@on_device
@pytest.mark.parametrize(("size", "dtype"), [(80, torch.float32), (16, torch.bfloat16)])
@pytest.mark.parametrize("columns", [0, 3])
def test_rows_move_to_the_front(size: int, dtype: torch.dtype, columns: int) -> None:
    heads, count = 3, 70
    pos = positions(heads, count, 8)
    pos[1] = -1
    index, left = plain_torch.lowest_block(
        pos.float(), pos >= 4, pos, (pos >= 0).sum(1), count // 3
    )
    k, v = draw(9, (heads, count, size), dtype), draw(10, (heads, count, size), dtype)
    kinds = (torch.float32, torch.int64, torch.int16)[:columns]
    more = [torch.randint(1, 99, pos.shape, generator=randoms(11)).to(kind) for kind in kinds]
    want = plain_torch.compacted(index, left, k, v, pos, more)
    index[torch.arange(count) >= left[:, None]] = 1 << 40  # need not be a row
    given = [guarded(t) for t in (index, left, k, v, pos)]
    got = kernel("triton.blocks").compacted(*given, [guarded(t) for t in more])
    for mine, theirs in zip((got[2], *got[3]), (want[2], *want[3]), strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine.cpu(), theirs)
    for mine, theirs, source in zip(got[:2], want[:2], (k, v), strict=True):
        for h, n in enumerate(left.tolist()):
            assert torch.equal(mine[h, :n].cpu(), theirs[h, :n])
            assert torch.equal(theirs[h, :n], source[h, index[h, :n]])
    for h, n in enumerate(left.tolist()):
        assert want[2][h, :n].tolist() == pos[h, index[h, :n]].tolist()
        assert bool((want[2][h, n:] == -1).all())
        assert not any(bool(c[h, n:].any()) for c in want[3])
