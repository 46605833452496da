"""Which rows stay, in Triton, as in torch, to the bit, in guarded memory.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from triton_device import INTERPRETED, draw, guarded, kernel, on_device, randoms

from minikv.kernels.evict import plain as plain_torch

pytest.importorskip("triton", reason="no Triton on this system")


def rows(heads: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores with many ties, positions in any order, some of which are no rows, and free rows."""
    scores = draw(1, (heads, count), torch.float32).mul(4).round() / 4
    scores[:, ::7] = 0.0
    scores[:, 3::7] = -0.0
    scores[:, 5::11] = math.inf
    scores[:, 6::11] = -math.inf
    pos = torch.stack(
        [torch.randperm(2 * count, generator=randoms(h))[:count] for h in range(heads)]
    )
    pos[:, 2::5] = -1
    free = (torch.rand((heads, count), generator=randoms(9)) < 0.7) & (pos >= 0)
    free[0] = False
    return scores, pos, free


def same(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    assert torch.equal(got.cpu(), want)


def chosen_alike(
    scores: Tensor,
    pos: Tensor,
    free: Tensor,
    wish: Tensor,
    totals: list[int],
    *,
    whole: bool = False,
) -> None:
    """By `best` and by `wanted`, as in torch. whole: also by `best` with further rows, and with one
    count for all heads."""
    made, key = kernel("evict.choose_gpu"), plain_torch.order_key(scores, pos, free)
    there = made.order_key(guarded(scores), guarded(pos), guarded(free))
    same(there, key)
    there, most = guarded(key), max(1, int(wish.max()))
    for also in (None, pos % 3 == 0)[: 1 + whole]:
        more = None if also is None else guarded(also)
        want = plain_torch.best(key, wish, most, also)
        same(made.best(there, guarded(wish), most, more), want)
    if whole:
        alike = wish[1:2].expand(len(wish))
        stride0 = guarded(wish[1:2]).expand(len(wish))
        same(made.best(there, stride0, most), plain_torch.best(key, alike, most))
    for total in totals:
        some, limit = torch.tensor(total), max(1, total)
        want = plain_torch.wanted(key, some, limit)
        same(made.wanted(there, guarded(some), limit), want)


@on_device
@pytest.mark.parametrize(("count", "few"), [(1, False), (40, True), (2100, True), (2100, False)])
def test_the_edge_is_found(count: int, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of scores with and without ties, of equal scores alone, with counts from none to more than
    there are. few: one program searches alone."""
    made = kernel("evict.choose_gpu")
    for name in ("_FEW", "_FEW_IN_ALL"):
        monkeypatch.setattr(made, name, 1 << 20 if few else 0)
    heads = 4
    tied, pos, free = rows(heads, count)
    free[1] = pos[1] >= 0  # many of one head, and none of the first
    have = int(free.sum())
    wish = torch.tensor([count // 2, count // 2, 0, count + 5])
    ends, between = [0, 1, have, have + 7], [have // 3, have - 1]
    chosen_alike(tied, pos, free, wish, between if count > 40 else ends + between, whole=True)
    chosen_alike(tied, pos, free & False, wish, ends[:1])
    chosen_alike(torch.zeros_like(tied), pos, free, wish, between[:1])
    plain = draw(8, tied.shape, torch.float32)
    plain[:, 1::3] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # a GPU's NaN
    far = torch.where(pos < 0, pos, pos + 2**31 - 3 * count)  # the last positions of an int32
    chosen_alike(plain, far, free, torch.tensor([1, 2, count // 3, 1]), between[1:])


@on_device
def test_the_edge_of_long_heads() -> None:
    """Longer than what one program searches; equal rows of several heads at the edge."""
    heads, count = 2, 5_000 if INTERPRETED else 20_000
    scores = draw(1, (heads, count), torch.float32).mul(300).round() / 300
    scores[1, : count // 2] = scores[0, : count // 2]
    pos = torch.arange(count).repeat(heads, 1)
    free = torch.rand((heads, count), generator=randoms(9)) < 0.8
    free[:, :4] = True
    wish = torch.tensor([count // 10, count // 3])
    chosen_alike(scores, pos, free, wish, [count // 5], whole=not INTERPRETED)
    scores[:] = -0.25  # the layer's best rows are the last ones of both heads
    chosen_alike(scores, pos, free, wish, [count // 5 + 1])
