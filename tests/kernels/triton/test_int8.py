"""Rows in int8 in Triton, as torch makes and reads them, to the bit, on odd sizes, in NaN-guarded
memory.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

import math

import pytest
import torch
from triton_device import INTERPRETED, close, draw, guarded, kernel, on_device, randoms

from minikv.kernels.torch import int8 as plain_torch

pytest.importorskip("triton", reason="no Triton on this system")

SIZES = [
    (3, 37, 64, torch.bfloat16),
    (1, 1, 80, torch.float16),
    (2, 130, 128, torch.float32),
    (2, 5, 256, torch.bfloat16),
    (2, 300, 16, torch.bfloat16),
]


@on_device
@pytest.mark.parametrize(("heads", "rows", "size", "dtype"), SIZES, ids=str)
def test_rows_become_codes(heads: int, rows: int, size: int, dtype: torch.dtype) -> None:
    x = draw(1, (rows, heads, size), dtype, 3.0)
    x[::3, :, ::2] = x[::3, :, ::2].sign() * 0.5  # codes halfway between two whole numbers
    x[::3, :, 1] = 127.0
    x[1::5] = 0.0
    made = kernel("triton.int8").to_codes
    for got, want in zip(
        made(guarded(x).transpose(0, 1)), plain_torch.to_codes(x.transpose(0, 1)), strict=True
    ):
        assert got.dtype == want.dtype
        assert torch.equal(got.cpu(), want)
    x[0, 0, 3] = math.nan
    codes, scale = made(guarded(x[:, 0].contiguous()))  # of one token
    assert codes.shape == (rows, size)
    assert scale.cpu().isnan().tolist() == [True] + [False] * (rows - 1)


@on_device
@pytest.mark.parametrize(("heads", "rows", "size", "dtype"), SIZES, ids=str)
def test_rows_are_read_from_codes(heads: int, rows: int, size: int, dtype: torch.dtype) -> None:
    codes, scale = plain_torch.to_codes(draw(1, (2 * rows + 3, size), dtype))
    index = torch.randint(0, len(codes), (heads, rows), generator=randoms(3))
    got = kernel("triton.int8").codes_at(guarded(codes), guarded(scale), guarded(index), dtype)
    want = plain_torch.codes_at(codes, scale, index, dtype)
    assert got.dtype == dtype
    if INTERPRETED and dtype == torch.bfloat16:  # it cuts bfloat16 off, where a GPU rounds
        close(got, want, 1e-2)
    else:
        assert torch.equal(got.cpu(), want)
