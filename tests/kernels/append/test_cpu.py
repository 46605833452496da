"""The row of a new token in C, as torch writes it."""

from __future__ import annotations

import pytest
import torch
from drawing import randoms
from torch import Tensor

from minikv.kernels.append import cpu as native
from minikv.kernels.append import plain as plain_torch
from minikv.kernels.layer import cpu as layer
from minikv.kernels.native import build

pytestmark = pytest.mark.skipif(build.find() is None, reason="no C compiler on this system")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("coded", [False, True])
def test_append(dtype: torch.dtype, coded: bool) -> None:
    heads, size, rows = 3, 20, 40
    both = randoms(1, heads, 2, size, dtype=dtype)
    key, value, slot = both[:, 0], both[:, 1], torch.tensor([7, 39, 0])
    key[1] = 0.0
    kinds = (torch.float32, torch.int16, torch.int32, torch.int64, torch.bool)

    def fresh() -> tuple[list[Tensor], list[Tensor]]:
        kind = torch.int8 if coded else dtype
        columns = [torch.full((rows, size), 5).to(kind) for _ in range(2)]
        columns.append(torch.full((rows,), 5, dtype=torch.int32))
        scales = [torch.full((rows,), 5.0) for _ in range(2)] if coded else []
        return columns + [torch.full((rows,), 1).to(kind) for kind in kinds], scales

    (ours, mine), (theirs, other) = fresh(), fresh()
    for who, columns, scales in ((native, ours, mine), (plain_torch, theirs, other)):
        who.append(key, value, slot, torch.tensor(77), *columns[:3], columns[3:], *scales)
    for one, two in zip([*ours, *mine], [*theirs, *other], strict=True):
        assert torch.equal(one, two)
    assert int(ours[2].sum()) == 5 * (rows - heads) + 77 * heads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("coded", [False, True])
def test_rotate_append(dtype: torch.dtype, coded: bool) -> None:
    """As rotating and appending one after the other."""
    heads, group, size, rows = 3, 2, 20, 40
    qkv, slot = randoms(1, heads * (group + 2), size, dtype=dtype), torch.tensor([7, 39, 0])
    angle = randoms(2, size // 2)
    cos = torch.cat((angle, angle)).cos().to(dtype)[None, None]
    sin = torch.cat((-angle, angle)).sin().to(dtype)[None, None]
    kind = torch.int8 if coded else dtype
    found = []
    for together in (True, False):
        k, v = (torch.full((rows, size), 5).to(kind) for _ in range(2))
        pos = torch.full((rows,), 5, dtype=torch.int32)
        blank = torch.ones(rows)
        scales = [torch.full((rows,), 5.0) for _ in range(2)] if coded else [None, None]
        given = slot, torch.tensor(77), k, v, pos, [blank]
        if together:
            query, key = native.rotate_append(qkv, cos, sin, *given, *scales)
        else:
            turned = layer.rotate(qkv[None, :-heads], cos, sin)[0]
            query, key = turned[:-heads].view(heads, group, size), turned[-heads:]
            native.append(key, qkv[-heads:], *given, *scales)
        found.append((query, key, k, v, pos, blank, *(t for t in scales if t is not None)))
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("before", [False, True])
def test_advance(before: bool) -> None:
    generator = torch.Generator().manual_seed(int(before))
    for _ in range(20):
        heads = torch.randint(0, 9, (5, 2, 3), generator=generator)
        start, length, cap, count, slot = heads.unbind(0)
        free_slot = torch.randint(-2, 4, (2, 3), generator=generator).clamp(min=-1)
        given = [start, length, cap, free_slot, torch.tensor(11), count, slot]
        ours, theirs = ([t.clone() for t in given] for _ in range(2))
        native.advance(*ours, before=before)
        plain_torch.advance(*theirs, before=before)
        for one, two in zip(ours, theirs, strict=True):
            assert torch.equal(one, two)
        assert int(ours[4]) == 12
