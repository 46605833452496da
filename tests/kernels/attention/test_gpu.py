"""Joining attention over sets of rows in Triton, as torch joins it, in NaN-guarded memory; and on a
GPU the kernels of the library that `torch/attention.py` calls there.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, INTERPRETED, close, draw, guarded, kernel, on_device, randoms

from minikv.kernels.attention import plain as plain_torch
from minikv.kernels.attention.plain import window_attention

pytest.importorskip("triton", reason="no Triton on this system")

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def sees_nothing(lse: Tensor, seed: int) -> Tensor:
    """Some queries saw no row."""
    return lse.masked_fill(torch.rand(lse.shape, generator=randoms(seed)) < 0.3, -math.inf)


@on_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "group", "rows", "size", "count"),
    [(2, 3, 5, 64, 2), (1, 1, 1, 80, 2), (3, 4, 37, 128, 2), (2, 2, 17, 16, 4), (1, 2, 3, 96, 1)],
)
def test_parts_are_joined(
    dtype: torch.dtype, heads: int, group: int, rows: int, size: int, count: int
) -> None:
    shape = (heads, group, rows, size)
    outs = [draw(i, shape, dtype) for i in range(count)]
    sums = [draw(10 + i, shape[:3], torch.float32, 4.0) for i in range(count)]
    # Every query saw a row of the last part. What saw none left zeros.
    sums = [*(sees_nothing(lse, i) for i, lse in enumerate(sums[:-1])), sums[-1]]
    outs = [
        out.masked_fill((lse == -math.inf)[..., None], 0.0)
        for out, lse in zip(outs, sums, strict=True)
    ]
    want, whole = plain_torch.merge(list(zip(outs, sums, strict=True)))
    # In memory some parts lie in the order of rows.
    there = [
        guarded(out.permute(2, 0, 1, 3)).permute(1, 2, 0, 3) if i % 2 else guarded(out)
        for i, out in enumerate(outs)
    ]
    parts = list(zip(there, (guarded(lse) for lse in sums), strict=True))
    got, lse = kernel("attention.gpu").merge(parts)
    assert got.dtype == dtype
    assert lse.shape == whole.shape
    close(got, want, DTYPES[dtype])
    close(lse, whole)
    if count > 1:
        assert got.permute(2, 0, 1, 3).is_contiguous()


@on_device
def test_what_saw_no_row_has_no_weight() -> None:
    shape = (2, 2, 9, 32)
    out, nan = draw(1, shape, torch.float32), torch.full(shape, math.nan)
    lse, none = draw(2, shape[:3], torch.float32), torch.full(shape[:3], -math.inf)
    there = [(guarded(nan), guarded(none)), (guarded(nan), guarded(none))]
    got, sums = kernel("attention.gpu").merge([*there, (guarded(out), guarded(lse))])
    close(got, out)
    close(sums, lse)


@pytest.mark.skipif(INTERPRETED, reason="the library's kernels for a GPU")
@on_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "keys", "window"),
    [(7, 7, None), (64, 300, None), (1, 50, None), (70, 300, 33), (128, 129, 1), (300, 300, 64)],
)
def test_the_librarys_kernels_mask_the_last_rows(
    dtype: torch.dtype, rows: int, keys: int, window: int | None
) -> None:
    q = draw(1, (rows, 2, 3, 64), dtype).to(DEVICE).permute(1, 2, 0, 3)
    k, v = (draw(i, (2, keys, 64), dtype).to(DEVICE) for i in (2, 3))
    if window is None:
        got, lse = plain_torch.last_rows_attention(q, k, v)
    else:
        got, lse = window_attention(q, k, v, window)
    x = q.double() @ k.double()[:, None].transpose(2, 3) / 8
    at = torch.arange(keys, device=DEVICE)
    back = at[-rows:, None] - at
    x = x.masked_fill((back < 0) | (back >= (window or keys)), -math.inf)
    close(got, x.softmax(-1) @ v.double()[:, None], DTYPES[dtype])
    close(lse, x.logsumexp(-1), DTYPES[dtype])
