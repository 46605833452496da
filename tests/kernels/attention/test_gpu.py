"""On a GPU, the library's kernels that attention/plain.py calls there (marker `gpu`)."""

from __future__ import annotations

import math

import pytest
import torch
from triton_device import DEVICE, INTERPRETED, close, draw, on_device

from minikv.kernels.attention import plain as plain_torch
from minikv.kernels.attention.plain import window_attention

pytest.importorskip("triton", reason="no Triton on this system")

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


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
