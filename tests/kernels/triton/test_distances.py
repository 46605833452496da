"""How unlike keys are in Triton, as torch says, on odd sizes, in NaN-guarded memory.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

import math

import pytest
import torch
from triton_device import close, draw, guarded, kernel, on_device

from minikv.kernels.torch import distances as plain_torch

pytest.importorskip("triton", reason="no Triton on this system")


@on_device
@pytest.mark.parametrize(
    ("heads", "rows", "size", "dtype"),
    [
        (3, 37, 64, torch.bfloat16),
        (1, 1, 80, torch.float16),
        (2, 2100, 128, torch.float32),
        (2, 5, 256, torch.bfloat16),
        (2, 130, 16, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("turned", [False, True], ids=["", "turned"])
def test_distances_of_keys(
    heads: int, rows: int, size: int, dtype: torch.dtype, turned: bool
) -> None:
    shape = (rows, heads, size) if turned else (heads, rows, size)
    key = draw(1, shape, dtype) + 0.25
    pos = torch.arange(rows).expand(heads, rows)
    made = kernel("triton.distances").key_distances

    def laid(t: torch.Tensor) -> torch.Tensor:
        """As keys of a first prompt lie in memory."""
        return t.transpose(0, 1) if turned else t

    got = made(laid(guarded(key)), guarded(pos[0]).expand(heads, rows))
    close(got, plain_torch.key_distances(laid(key), pos))
    pos = pos.clone()
    laid(key)[:, ::5], pos[:, ::5] = math.nan, -1  # no rows
    laid(key)[:, 1::7] = 0.0
    got = made(laid(guarded(key)), guarded(pos))
    close(got, plain_torch.key_distances(laid(key), pos))
    assert not bool(got[:, ::5].any())
