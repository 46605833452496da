"""The policies' columns from before a prompt in Triton, as torch reads them, in guarded memory.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

import pytest
import torch
from triton_device import draw, guarded, kernel, on_device, randoms

from minikv.kernels.torch import columns as plain_torch

pytest.importorskip("triton", reason="no Triton on this system")


@on_device
@pytest.mark.parametrize(("heads", "rows", "new"), [(1, 1, 1), (3, 40, 5), (2, 255, 300)])
def test_columns_are_carried(heads: int, rows: int, new: int) -> None:
    total = 2 * heads * rows
    columns = [
        draw(1, (total,), torch.float32),
        torch.randint(1 << 40, (total,), generator=randoms(2)),
        torch.randint(1 << 20, (total,), generator=randoms(3), dtype=torch.int32),
    ]
    index = torch.randint(total, (heads, rows), generator=randoms(4))
    live = torch.rand((heads, rows), generator=randoms(5)) < 0.7
    made = kernel("triton.columns").carried_columns
    got = made([guarded(c) for c in columns], guarded(index), guarded(live), new)
    for mine, theirs in zip(
        got, plain_torch.carried_columns(columns, index, live, new), strict=True
    ):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine.cpu(), theirs)
    assert made([], guarded(index), guarded(live), new) == []
