"""The product before attention that also writes the new row, in Triton: bit for bit the separate
kernels, and near torch, on odd sizes, in NaN-guarded memory.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import rest_twin
import torch
from torch import Tensor
from triton_device import DEVICE, INTERPRETED, draw, guarded, kernel, on_device, randoms, untouched

from minikv.kernels.torch import append as plain_torch
from minikv.models.linear import Matrix, Plain
from minikv.models.linear_gpu import as_read, kept_on

pytest.importorskip("triton", reason="no Triton on this system")

BFLOAT16 = torch.bfloat16
KINDS = (torch.float32, torch.int16, torch.int64, torch.bool)
LONG = (1, 7, 16, 4128)
"""Heads, queries of each, head size, columns: more than are read at once, and not whole."""
CASES = [  # A program takes tens of milliseconds, so there are few.
    (LONG, "int4", BFLOAT16, True, True),
    (LONG, "auto", torch.float16, False, False),
    ((2, 1, 24, 96), "int8", torch.float16, True, False),
    ((2, 1, 24, 96), "int4", torch.float16, False, True),
    ((1, 4, 40, 32), "auto", BFLOAT16, True, True),
    ((1, 4, 24, 32), "int8", BFLOAT16, False, False),
]


def room(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype)


def weights(outs: int, n: int, form: str, dtype: torch.dtype, biased: bool) -> Matrix:
    bias = draw(2, (outs,), dtype) if biased else None
    plain = Plain(draw(1, (outs, n), dtype) / n**0.5, bias)
    made = as_read(kept_on(torch.device("cuda"), plain, form, room))
    assert made is not None
    return made


def there(matrix: Matrix) -> Matrix:
    """In guarded memory on the device."""
    beside = {
        name: None if part is None else guarded(part)
        for name, part in (("scales", matrix.scales), ("bias", matrix.bias))
    }
    return replace(matrix, weights=guarded(matrix.weights), **beside)


@on_device
@pytest.mark.parametrize(("sizes", "form", "dtype", "biased", "extra"), CASES)
def test_it_is_the_product_and_then_the_row(
    sizes: tuple[int, ...], form: str, dtype: torch.dtype, biased: bool, extra: bool
) -> None:
    """Of the second of two layers, with columns of every kind that become 0, and without."""
    heads, group, size, n = sizes
    rows = 3 * heads + 2
    matrix = weights(heads * (group + 2) * size, n, form, dtype, biased)
    norm, x = draw(3, (n,), dtype), draw(4, (1, n), dtype, 3.0)
    angle = draw(5, (1, 1, size // 2), torch.float32, 3.0)
    cos = torch.cat((angle.cos(), angle.cos()), -1).to(dtype)
    sin = torch.cat((-angle.sin(), angle.sin()), -1).to(dtype)
    slot = torch.randperm(rows, generator=randoms(6))[: 2 * heads].view(2, heads)
    outcomes = []
    for way in ("one launch", "two launches", "torch"):
        k, v = (guarded(torch.full((rows, size), 3.0, dtype=dtype)) for _ in range(2))
        pos = guarded(torch.full((rows,), 5, dtype=torch.int32))
        blank = [guarded(torch.ones(rows, dtype=kind)) for kind in KINDS[: 4 if extra else 0]]
        row, by, *turn = map(guarded, (x, norm, cos, sin))
        slots, position = guarded(slot), guarded(torch.tensor(70001))
        rest, append = kernel("triton.rest"), kernel("triton.append")
        if way == "one launch":
            lengths = torch.ones_like(slots)
            arena = kernel("triton.step_arena").step_arena(
                {"k": k, "v": v, "pos": pos},
                blank,
                position,
                slots,
                lengths,
                slots,
                (None, None),
                lengths[:, 0],
                None,
                None,
                lengths[0],
            )
            product = rest.normed_product(there(matrix), by, 1e-6)
            fused = kernel("triton.append_product").append_product
            query = fused(product, row, *turn, arena, 1)
        else:
            torch_alone = way == "torch"
            make = rest_twin.normed_product if torch_alone else rest.normed_product
            write = plain_torch.rotate_append if torch_alone else append.rotate_append
            moved = matrix if torch_alone and DEVICE == "cpu" else there(matrix)
            qkv = make(moved, by, 1e-6)(row).view(-1, size)
            query, _ = write(qkv, *turn, slots[1], position, k, v, pos, blank)
        assert query.shape == (heads, group, size)
        made = [k, v, pos, *blank]
        assert all(untouched(t) for t in (*made, row, by, *turn, slots, position))
        assert torch.equal(row.cpu(), x)
        outcomes.append([t.cpu() for t in (query, *made)])
    got, two, plain = outcomes
    loose = 2e-2 if dtype == BFLOAT16 else 5e-3
    for one, want in zip(got[:3], plain[:3], strict=True):
        one, want = one.double(), want.double()
        assert float((one - want).norm()) <= loose * float(want.norm())
    for one, want in zip(got[3:], plain[3:], strict=True):
        assert torch.equal(one, want)
    if INTERPRETED:  # a GPU may add the columns in another order
        for one, want in zip(got, two, strict=True):
            assert torch.equal(one, want)
