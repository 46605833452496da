"""Hash codes in Triton, as torch makes them, on odd sizes, in NaN-guarded memory.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

import pytest
import torch
from triton_device import draw, guarded, kernel, on_device

from minikv.kernels.torch import hash_codes as plain_torch

pytest.importorskip("triton", reason="no Triton on this system")


@on_device
@pytest.mark.parametrize(
    ("heads", "rows", "size", "bits", "dtype", "code"),
    [
        (3, 37, 64, 16, torch.bfloat16, torch.int32),
        (1, 1, 80, 15, torch.float16, torch.int16),
        (2, 130, 128, 33, torch.float32, torch.int64),
        (2, 21, 256, 64, torch.bfloat16, torch.int64),
        (2, 300, 16, 31, torch.bfloat16, torch.int32),
    ],
    ids=str,
)
def test_codes_of_keys(
    heads: int, rows: int, size: int, bits: int, dtype: torch.dtype, code: torch.dtype
) -> None:
    """Whole numbers, whose sums no order of addition changes; some are zero."""
    key = draw(1, (rows, heads, size), torch.float32, 2.0).round().to(dtype)
    key[::4] = 0.0
    matrix = draw(2, (size, bits), torch.float32, 2.0).round()
    got = kernel("triton.hash_codes").hash_codes(
        guarded(key).transpose(0, 1), guarded(matrix), code
    )
    assert got.dtype == code
    assert torch.equal(got.cpu(), plain_torch.hash_codes(key.transpose(0, 1), matrix, code))


@on_device
@pytest.mark.parametrize(
    ("heads", "rows", "probes", "bits", "code"),
    [
        (2, 37, 3, 15, torch.int16),
        (3, 300, 1500, 16, torch.int32),
        (1, 1, 1, 64, torch.int64),
        (2, 21, 70, 33, torch.int64),
    ],
    ids=str,
)
def test_distances_to_all_probes(
    heads: int, rows: int, probes: int, bits: int, code: torch.dtype
) -> None:
    """Of part of a column, too."""
    made = torch.Generator().manual_seed(bits)
    places = torch.arange(bits)
    stored, probe = (
        ((torch.rand((heads, n, bits), generator=made) < 0.5).to(torch.int64) << places).sum(2)
        for n in (rows + 5, probes)
    )
    stored = stored.to(code)
    got = kernel("triton.hash_codes").code_distances(
        guarded(stored)[:, :rows], guarded(probe), bits
    )
    assert torch.equal(got.cpu(), plain_torch.code_distances(stored[:, :rows], probe, bits))
