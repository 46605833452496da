"""Packed matrices of a GPU, with torch: the layout and what is computed do not depend on where they
lie. tests/launches runs a network with them on a stand-in for a GPU, tests/kernels the
kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minikv.models.linear import Int4, Int8, Plain
from minikv.models.linear_gpu import (
    Int4OnGpu,
    Int8OnGpu,
    pack_int4_rows,
    unpack_int4_rows,
)
from minikv.pages import empty

FORMS = {"int8": (Int8OnGpu, Int8), "int4": (Int4OnGpu, Int4)}


def plain(rows: int, columns: int, *, bias: bool = False) -> Plain:
    made = torch.Generator().manual_seed(7)
    weight = torch.randn(rows, columns, generator=made).to(torch.bfloat16)
    return Plain(weight, weight[:, 0].clone() if bias else None)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (70, 96), (5, 192)])
def test_the_numbers_are_those_of_a_cpu(form: str, rows: int, columns: int) -> None:
    matrix = plain(rows, columns)
    far, near = (kind(matrix, empty) for kind in FORMS[form])
    assert far.shape == near.shape == matrix.shape
    torch.testing.assert_close(far.dense(), near.dense(), rtol=2**-7, atol=2**-8)
    error = (far.dense().float() - matrix.weight.float()).norm() / matrix.weight.float().norm()
    assert error < (0.01 if form == "int8" else 0.12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("count", [1, 40])
def test_products(form: str, bias: bool, count: int) -> None:
    matrix = FORMS[form][0](plain(70, 96, bias=bias), empty)
    x = torch.randn(count, 96, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    want = x.double() @ matrix.dense().double().T
    if matrix.bias is not None:
        want += matrix.bias.double()
    for out in (None, torch.empty((64, 70), dtype=torch.bfloat16)):
        got = matrix(x, out)
        assert got.shape == (count, 70)
        torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=6e-2)


def test_rows_are_packed_a_part_at_a_time() -> None:
    """As a head is read: the same as at once."""
    matrix = plain(70, 96)
    for kind in (Int8OnGpu, Int4OnGpu):
        whole = kind(matrix, empty)
        parts = kind(Plain(matrix.weight.to("meta")), empty)
        for start, end in ((0, 32), (32, 70)):
            parts.pack(start, matrix.weight[start:end])
        assert torch.equal(parts.dense(), whole.dense())
        assert parts.nbytes == whole.nbytes


@pytest.mark.parametrize("group", [32, 64, 128])
def test_a_packed_weight_is_at_most_half_a_step_off(group: int) -> None:
    weight = plain(7, 3 * group).weight
    packed, scales = four_bits(weight, group)
    unpacked = torch.empty_like(weight)
    unpack_int4_rows(packed, scales, unpacked)
    step = scales[..., 0].float().t()[..., None]  # [m, groups, 1]
    off = (unpacked.float() - weight.float()).view(7, 3, group).abs()
    # and the offset and the result are rounded to bfloat16
    assert bool((off <= 0.5 * step + 2**-7 * weight.float().abs().max()).all())


def test_the_layout() -> None:
    """Byte i of a group: column i below, column group / 2 + i above."""
    steps = torch.arange(32) % 16
    weight = (steps.float() - 8)[None].to(torch.bfloat16)  # scale 1, offset 0
    packed, scales = four_bits(weight, 32)
    assert scales.flatten().tolist() == [1.0, 0.0]
    assert packed[0].tolist() == [i | i << 4 for i in range(16)]


def four_bits(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    packed = torch.empty((rows, columns // 2), dtype=torch.uint8)
    scales = torch.empty((columns // group, rows, 2), dtype=torch.bfloat16)
    pack_int4_rows(weight, packed, scales)
    return packed, scales
