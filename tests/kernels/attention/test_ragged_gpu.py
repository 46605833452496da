"""Attention over the rows of earlier turns in Triton, against float64 arithmetic and torch, in
NaN-guarded memory.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

import math

import pytest
import torch
from prompts import weights
from triton_device import close, draw, guarded, kernel, on_device, randoms

from minikv.kernels import Segments
from minikv.kernels.attention import plain as plain_torch

pytest.importorskip("triton", reason="no Triton on this system")


@on_device
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(
    ("group", "size", "rows", "dtype"),
    [
        (3, 64, 5, torch.float32),
        (1, 80, 1, torch.bfloat16),
        (4, 128, 40, torch.float16),
        (1, 256, 3, torch.bfloat16),
        (2, 96, 9, torch.float32),
    ],
    ids=str,
)
def test_segments_of_uneven_heads(
    group: int, size: int, rows: int, dtype: torch.dtype, window: int | None
) -> None:
    lengths, free = [63, 0, 1, 111, 2], [5, -1, -1, 110, 0]
    heads, first = len(lengths), 200
    starts = [3, 70, 70, 75, 190]
    q = draw(1, (heads, group, rows, size), dtype, 2.0)
    k, v = (draw(n, (200, size), dtype) for n in (2, 3))
    pos = torch.randperm(200, generator=randoms(4)).to(torch.int32)
    mine = [
        [s + j for j in range(n) if j != gone]
        for s, n, gone in zip(starts, lengths, free, strict=True)
    ]
    for row in set(range(200)) - {row for rows_ in mine for row in rows_}:
        k[row] = v[row] = math.nan
    free_slot = [s + j if j >= 0 else -1 for s, j in zip(starts, free, strict=True)]
    at = torch.arange(first, first + rows)
    layout = [guarded(torch.tensor(x)) for x in (starts, lengths, free_slot)]
    got, lse = kernel("attention.gpu").ragged_prefill(
        guarded(q),
        Segments(guarded(k), guarded(v), *layout[:2], 120, guarded(pos)),
        layout[2],
        guarded(at),
        window,
    )
    loose = 2e-5 if dtype == torch.float32 else 2e-2 if dtype == torch.bfloat16 else 3e-3
    for h, rows_ in enumerate(mine):
        where = pos[rows_].long()[None]
        p, whole = weights(q[h : h + 1], k[None, rows_], at, where, window)
        close(got[h : h + 1], torch.einsum("hgtn,hnd->hgtd", p, v[None, rows_].double()), loose)
        close(lse[h : h + 1], whole, 2e-5)
    twin = plain_torch.ragged_prefill(
        q.float(),
        Segments(k.float(), v.float(), *(x.cpu() for x in layout[:2]), 120, pos),
        layout[2].cpu(),
        at,
        window,
    )
    close(got, twin[0], loose)
    close(lse, twin[1], 2e-5)
