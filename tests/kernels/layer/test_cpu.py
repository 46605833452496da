"""The small operators of a layer in C, against float64 arithmetic and torch, on odd sizes."""

from __future__ import annotations

import math

import pytest
import torch
from drawing import close, randoms

from minikv.kernels.layer import cpu as native
from minikv.kernels.layer import plain as plain_torch
from minikv.kernels.native import build

pytestmark = pytest.mark.skipif(build.find() is None, reason="no C compiler on this system")
DTYPES = [torch.float32, torch.bfloat16]
LOOSE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (1, 768), (3, 77), (200, 640)])
def test_the_operators_between_products(dtype: torch.dtype, rows: int, size: int) -> None:
    x = randoms(1, rows, 2 * size, dtype=dtype, by=3.0)[:, :size]
    y, weight = randoms(2, rows, size, dtype=dtype), randoms(3, size, dtype=dtype)
    loose = LOOSE[dtype]
    for more in (None, y):
        one, two = (torch.cat((x, x), 1)[:, :size] for _ in range(2))  # rows that are apart
        got = native.add_norm(one, more, weight, 1e-5)
        want = plain_torch.add_norm(two, more, weight, 1e-5)
        close(got, want, loose)
        close(one, two, loose)
        exact = one.double()
        exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        close(got, exact, loose)
    both = randoms(4, rows, 2 * size, dtype=dtype, by=20.0)
    want = torch.nn.functional.silu(both[:, :size].double()) * both[:, size:].double()
    got = native.silu_mul(both)
    assert got.data_ptr() == both.data_ptr()
    close(got, want, loose)
    heads, angle = randoms(5, rows, 5, 22, dtype=dtype)[:, :3], randoms(6, rows, 1, 11)
    cos, sin = torch.cat((angle, angle), -1).cos(), torch.cat((-angle, angle), -1).sin()
    given = heads, cos.to(dtype), sin.to(dtype)
    got = native.rotate(*given)
    assert got.is_contiguous()
    close(got, plain_torch.rotate(*given), loose)


@pytest.mark.parametrize("value", [0.0, -1e-3, -20.0, -87.5, -200.0, 80.0, math.inf, math.nan])
def test_silu_at_its_ends(value: float) -> None:
    both = torch.tensor([[value] * 17 + [1.0] * 17])
    want = torch.nn.functional.silu(torch.tensor(value))
    torch.testing.assert_close(
        native.silu_mul(both)[0], want.expand(17), equal_nan=True, rtol=1e-6, atol=1e-6
    )
