"""The specification of products of rounded activations, beside sums in float64."""

from __future__ import annotations

import math

import integer_spec as integer
import pytest
import torch
from drawing import randoms

from minikv.models.linear import Int4, Plain, half_tile


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 200])
def test_a_large_activation_changes_only_its_own_block(columns: int) -> None:
    x = randoms(1, 3, columns, dtype=torch.bfloat16)
    x[1, columns - 1] = 900.0
    codes, scale = integer.rounded(x)
    assert codes.shape == (3, -(-columns // integer.BLOCK), integer.BLOCK)
    assert codes.abs().max() == 127
    assert torch.equal(codes, codes.round())
    back = (codes * scale[..., None]).view(3, -1)[:, :columns]
    steps = scale.repeat_interleave(integer.BLOCK, 1)[:, :columns]
    assert bool(((back - x.float()).abs() <= 0.5001 * steps).all())
    before = randoms(1, 3, columns, dtype=torch.bfloat16)
    untouched = torch.ones(3, columns, dtype=torch.bool)
    untouched[1, (columns - 1) // integer.BLOCK * integer.BLOCK :] = False
    first, step = integer.rounded(before)
    was = (first * step[..., None]).view(3, -1)[:, :columns]
    assert torch.equal(back[untouched], was[untouched])


def test_rows_that_are_not_numbers_stay_so() -> None:
    x = randoms(1, 4, 64, dtype=torch.bfloat16)
    x[1, 40], x[2, 3], x[3] = math.nan, -math.inf, 0.0
    codes = torch.randint(-127, 128, (5, 64), dtype=torch.int8)
    made = integer.int8_product(x, codes, torch.ones(5, dtype=torch.bfloat16))
    assert not bool(made[1:3].isfinite().any())
    assert bool(made[0].isfinite().all())
    assert not bool(made[3].any())


@pytest.mark.parametrize(("rows", "columns"), [(3, 31), (70, 160)])
def test_eight_bits(rows: int, columns: int) -> None:
    x = randoms(1, 6, columns, dtype=torch.bfloat16)
    drawn = torch.Generator().manual_seed(3)
    codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, generator=drawn)
    scale = randoms(2, rows, dtype=torch.bfloat16).abs() + 0.1
    got = integer.int8_product(x, codes, scale).double()
    exact = x.double() @ (codes.double() * scale.double()[:, None]).T
    assert float((got - exact).norm() / exact.norm()) < 8e-3
    a, step = integer.rounded(x)
    kept = (a * step[..., None]).view(6, -1)[:, :columns].double()
    want = kept @ (codes.double() * scale.double()[:, None]).T
    torch.testing.assert_close(got, want.bfloat16().double(), rtol=1e-2, atol=1e-4 * columns)
    assert float((got - want).norm() / want.norm()) < 3e-3


@pytest.mark.skipif(half_tile() is None, reason="torch's layout is not known here")
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (67, 192), (130, 256)])
def test_four_bits(rows: int, columns: int) -> None:
    x = randoms(1, 6, columns, dtype=torch.bfloat16)
    matrix = Int4(Plain(randoms(2, rows, columns, dtype=torch.bfloat16)))
    got = integer.int4_product(x, matrix.packed, matrix.scales, half_tile() or 0, rows)
    a, step = integer.rounded(x)
    kept = (a * step[..., None]).view(6, -1).double()
    want = kept @ matrix.dense().double().T  # weights that were rounded to bfloat16
    assert got.shape == want.shape
    assert float((got.double() - want).norm() / want.norm()) < 5e-3
