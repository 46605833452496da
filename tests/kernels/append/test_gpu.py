"""The row of a new token in Triton, as torch writes it, in guarded memory.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

import pytest
import torch
from triton_device import (
    DEVICE,
    close,
    draw,
    guarded,
    kernel,
    on_device,
    randoms,
    untouched,
)

from minikv.kernels.append import plain as plain_torch

pytest.importorskip("triton", reason="no Triton on this system")


@on_device
@pytest.mark.parametrize("before", [False, True])
def test_advance(before: bool) -> None:
    sides = (3, 5)
    start, length, cap, count = (torch.randint(0, 9, sides, generator=randoms(i)) for i in range(4))
    free_slot = torch.randint(-4, 5, sides, generator=randoms(4)).clamp(min=-1)
    given = (start, length, cap, free_slot, torch.tensor(40), count, torch.full(sides, 77))
    outcomes = []
    for advance in (plain_torch.advance, kernel("append.gpu").advance):
        mine = [guarded(t) for t in given]
        advance(*mine, before=before)
        assert all(untouched(t) for t in mine)
        outcomes.append(mine)
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    assert int(outcomes[1][4]) == 41


@on_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "group", "size", "coded"), [(1, 1, 64, False), (5, 3, 80, True), (3, 4, 256, False)]
)
def test_rotate_append(heads: int, group: int, size: int, coded: bool, dtype: torch.dtype) -> None:
    """Queries and keys as `rotate` makes them; what is written is what `append` writes of them."""
    rows = 3 * heads + 2
    qkv = draw(1, (heads * (group + 2), size), dtype, 3.0)
    qkv[-1] = 0.0
    angle = draw(2, (1, 1, size // 2), torch.float32, 3.0)
    cos = torch.cat((angle.cos(), angle.cos()), -1).to(dtype)
    sin = torch.cat((-angle.sin(), angle.sin()), -1).to(dtype)
    slot = torch.randperm(rows, generator=randoms(3))[:heads]
    stored = torch.int8 if coded else dtype
    position = torch.tensor(41, device=DEVICE)
    outcomes = []
    for write in (plain_torch.rotate_append, kernel("append.gpu").rotate_append, None):
        k, v = (guarded(torch.full((rows, size), 3).to(stored)) for _ in range(2))
        pos = guarded(torch.full((rows,), 5, dtype=torch.int32))
        kinds = (torch.float32, torch.int16, torch.bool)
        blank = [guarded(torch.ones(rows, dtype=kind)) for kind in kinds]
        scales = [guarded(torch.full((rows,), 9.0)) if coded else None for _ in range(2)]
        if write is not None:
            given = map(guarded, (qkv, cos, sin, slot))
            query, key = write(*given, position, k, v, pos, blank, *scales)
            assert (query.shape, key.shape) == ((heads, group, size), (heads, size))
        else:  # of the kernel's own keys
            query, key = outcomes[1][:2]
            value = guarded(qkv)[-heads:]
            plain_torch.append(key, value, slot.to(DEVICE), position, k, v, pos, blank, *scales)
        made = [t for t in (k, v, pos, *blank, *scales) if t is not None]
        assert all(untouched(t) for t in made)
        outcomes.append([query, key, *made])
    loose = 1e-5 if dtype == torch.float32 else 2e-2
    for got, want in zip(outcomes[1][:2], outcomes[0][:2], strict=True):
        close(got, want, loose)
    for got, want in zip(outcomes[1][2:], outcomes[2][2:], strict=True):
        assert torch.equal(got, want)
