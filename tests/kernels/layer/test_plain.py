"""The small operators of a layer in torch, against float64 arithmetic."""

from __future__ import annotations

import pytest
import torch
from drawing import close, randoms

from minikv.kernels.layer import plain as layer

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 48), (3, 129), (17, 576)])
@pytest.mark.parametrize("adds", [False, True])
def test_add_norm(dtype: torch.dtype, rows: int, size: int, adds: bool) -> None:
    """In float64, by the definition."""
    x, y, weight = (
        randoms(i, *s, dtype=dtype, by=2.0) for i, s in enumerate([(rows, size)] * 2 + [(size,)])
    )
    total = (x + y if adds else x).double()
    want = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    close(layer.add_norm(x, y if adds else None, weight, 1e-5), want, DTYPES[dtype])
    close(x, total)
