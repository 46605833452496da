"""Packing in C gives the numbers of torch's, bit for bit, on odd sizes and extreme values."""

from __future__ import annotations

import math

import pytest
import torch
from drawing import randoms

from minikv.kernels.native import build
from minikv.kernels.product import cpu as packing
from minikv.models import linear

pytestmark = pytest.mark.skipif(build.find() is None, reason="no C compiler on this system")

SHAPES = [(1, 32), (67, 48), (64, 96), (130, 192), (200, 384), (33, 64), (5, 14336), (300, 1024)]


def drawn(rows: int, columns: int, size: float) -> torch.Tensor:
    """A matrix with NaN around it; rows of zeros, of one number, and of numbers far apart."""
    guarded = torch.full((rows + 2, columns), math.nan, dtype=torch.bfloat16)
    guarded[1:-1] = (randoms(rows, rows, columns) * size).bfloat16()
    weight = guarded[1:-1]
    if rows > 3:
        weight[0], weight[1], weight[2, 5] = 0, 3e38, -1e30
        weight[3] = 1e-39
    return weight


@pytest.mark.parametrize("size", [0.02, 1e30, 1e-36])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_eight_bits(shape: tuple[int, int], size: float) -> None:
    weight = drawn(*shape, size)
    made = []
    for pack in (packing.pack_int8, linear.pack_int8):
        codes = torch.full(shape, 99, dtype=torch.int8)
        scale = torch.zeros(shape[0], dtype=torch.bfloat16)
        pack(weight, codes, scale)
        made.append((codes, scale))
    (codes, scale), (want_codes, want_scale) = made
    assert torch.equal(scale, want_scale)
    assert torch.equal(codes, want_codes)


@pytest.mark.skipif(linear.half_tile() is None, reason="torch's layout is not known here")
@pytest.mark.parametrize("size", [0.02, 1e30, 1e-36])
@pytest.mark.parametrize("shape", [s for s in SHAPES if linear.group_of(s[1])], ids=str)
def test_four_bits(shape: tuple[int, int], size: float) -> None:
    rows, columns = shape
    group = linear.group_of(columns) or 0
    weight, padded, half = drawn(*shape, size), -(-rows // 64) * 64, linear.half_tile()
    assert half is not None
    made = []
    for pack in (packing.pack_int4, linear.pack_int4):
        packed = torch.full((padded, columns // 2), 99, dtype=torch.uint8)
        scales = torch.full((columns // group, padded, 2), 7.0, dtype=torch.bfloat16)
        pack(weight, packed, scales, half)
        assert (scales[:, rows:] == 7).all()  # whose rows are not there
        made.append((packed, scales))
    (packed, scales), (want_packed, want_scales) = made
    assert torch.equal(scales, want_scales)
    assert torch.equal(packed, want_packed)


@pytest.mark.skipif(linear.half_tile() is None, reason="torch's layout is not known here")
@pytest.mark.parametrize("shape", [s for s in SHAPES if linear.group_of(s[1])], ids=str)
def test_four_bits_and_back(shape: tuple[int, int]) -> None:
    rows, columns = shape
    matrix = linear.Int4(linear.Plain(drawn(rows, columns, 0.02)))
    size = -(-rows // 64) * 64
    want = matrix.columns(0, rows)
    for start in range(0, rows, 64):  # rows of a scale lie apart in all but the whole
        guarded = torch.full((columns + 2, size - start), 7.0, dtype=torch.bfloat16)
        tiles = slice(start, size)
        half = linear.half_tile() or 0
        packing.unpack_int4(matrix.packed[tiles], matrix.scales[:, tiles], half, guarded[1:-1])
        torch.testing.assert_close(
            guarded[1:-1, : rows - start], want[:, start:], atol=0, rtol=0, equal_nan=True
        )
        assert bool((guarded[[0, -1]] == 7).all())


@pytest.mark.parametrize("half", [16, 32])
def test_the_layout_is_the_one_that_was_asked_for(half: int) -> None:
    """Row i is below and row half + i above in the bytes of a column."""
    weight = drawn(70, 64, 0.5)
    packed = torch.full((128, 32), 99, dtype=torch.uint8)
    scales = torch.zeros(1, 128, 2, dtype=torch.bfloat16)
    packing.pack_int4(weight, packed, scales, half)
    tiles = packed.view(128 // (2 * half), 64, half)
    codes = torch.cat((tiles & 15, tiles >> 4), 2).transpose(1, 2).reshape(128, 64)
    assert not codes[70:].any()
    values = (codes[4:70].float() - 8) * scales[0, 4:70, :1].float() + scales[0, 4:70, 1:].float()
    step = scales[0, 4:70, :1].float()
    assert bool(((values - weight[4:].float()).abs() <= 0.52 * step + 1e-2).all())


def test_weights_that_are_not_numbers_stay_so() -> None:
    """A row with NaN or infinity is not made into numbers that look right."""
    for bad in (math.nan, math.inf):
        weight = drawn(4, 64, 0.02)
        weight[2, 7] = bad
        codes, scale = torch.zeros(4, 64, dtype=torch.int8), torch.zeros(4, dtype=torch.bfloat16)
        packing.pack_int8(weight, codes, scale)
        assert not scale[2].isfinite()
        assert scale[[0, 1, 3]].isfinite().all()
