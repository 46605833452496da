"""Products with packed weights in Triton, against torch, on odd sizes, in NaN-guarded memory.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_device import INTERPRETED, close, draw, guarded, kernel, on_device

from minikv.models.linear_gpu import pack_int4_rows, unpack_int4_rows

pytest.importorskip("triton", reason="no Triton on this system")

SIZES = [(1, 48, 16), (3, 33, 192), (17, 70, 400), (16, 64, 256)]
"""Rows of x, rows of the weights, columns."""
BFLOAT16 = torch.bfloat16


def int8(outputs: int, size: int) -> tuple[Tensor, Tensor]:
    codes = draw(1, (outputs, size), torch.float32, 50.0).clamp(-127, 127).to(torch.int8)
    return codes, draw(2, (outputs,), torch.float32).abs().to(BFLOAT16) / 50


@on_device
@pytest.mark.parametrize(("rows", "outputs", "size"), SIZES)
@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float32, torch.float16], ids=str)
def test_w8a16_product(rows: int, outputs: int, size: int, dtype: torch.dtype) -> None:
    x, (codes, scale) = draw(3, (rows, size), dtype), int8(outputs, size)
    there = guarded(codes), guarded(scale)
    got = kernel("product.gpu").w8a16_product(guarded(x), *there)
    assert got.dtype == dtype
    want = x.double() @ (codes.double() * scale.double()[:, None]).T
    close(got / size**0.5, want / size**0.5, 1e-2 if dtype == BFLOAT16 else 2e-3)


@on_device
@pytest.mark.parametrize(("group", "groups"), [(32, 1), (32, 5), (64, 3), (128, 2)])
@pytest.mark.parametrize(("rows", "outputs"), [(1, 48), (3, 33), (17, 70)])
def test_w4a16_product(rows: int, outputs: int, group: int, groups: int) -> None:
    size = group * groups
    packed, scales, weight = four_bits(outputs, group, groups)
    x = draw(3, (rows, size), BFLOAT16)
    got = kernel("product.gpu").w4a16_product(guarded(x), guarded(packed), guarded(scales))
    close(got / size**0.5, x.double() @ weight.double().T / size**0.5, 2e-2)


@on_device
@pytest.mark.parametrize(("outputs", "group", "groups"), [(9, 32, 3), (48, 64, 1), (5, 128, 2)])
@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float32], ids=str)
def test_unpacking_has_the_same_bits(
    outputs: int, group: int, groups: int, dtype: torch.dtype
) -> None:
    packed, scales, weight = four_bits(outputs, group, groups)
    out = guarded(torch.zeros((outputs, group * groups), dtype=dtype))
    kernel("product.gpu").unpack_int4_rows(guarded(packed), guarded(scales), out)
    if INTERPRETED:  # it cuts bfloat16 off, where a GPU rounds
        close(out, weight, 2**-7)
    else:
        assert torch.equal(out.cpu(), weight.to(dtype))


def four_bits(outputs: int, group: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Packed weights, their scales, and the weights that they stand for."""
    weight = draw(1, (outputs, group * groups), BFLOAT16)
    packed = torch.empty((outputs, group * groups // 2), dtype=torch.uint8)
    scales = torch.empty((groups, outputs, 2), dtype=BFLOAT16)
    pack_int4_rows(weight, packed, scales)
    unpacked = torch.empty_like(weight)
    unpack_int4_rows(packed, scales, unpacked)
    return packed, scales, unpacked
