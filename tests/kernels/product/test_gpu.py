"""Unpacking weights of four bits in Triton, against torch, on odd sizes, in NaN-guarded memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton_device import INTERPRETED, close, draw, guarded, kernel, on_device

from minikv.models.linear import pack_int4_rows, unpack_int4_rows

pytest.importorskip("triton", reason="no Triton on this system")

BFLOAT16 = torch.bfloat16


@on_device
@pytest.mark.parametrize(("outputs", "group", "groups"), [(9, 32, 3), (48, 64, 1), (5, 128, 2)])
@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float32], ids=str)
def test_unpacking_has_the_same_bits(outputs: int, group: int, groups: int, dtype: Any) -> None:
    plain = draw(1, (outputs, group * groups), BFLOAT16)
    packed = torch.empty((outputs, group * groups // 2), dtype=torch.uint8)
    scales = torch.empty((groups, outputs, 2), dtype=BFLOAT16)
    pack_int4_rows(plain, packed, scales)
    weight = torch.empty_like(plain)
    unpack_int4_rows(packed, scales, weight)
    out = guarded(torch.zeros((outputs, group * groups), dtype=dtype))
    kernel("product.gpu").unpack_int4_rows(guarded(packed), guarded(scales), out)
    if INTERPRETED:  # it cuts bfloat16 off, where a GPU rounds
        close(out, weight, 2**-7)
    else:
        assert torch.equal(out.cpu(), weight.to(dtype))
