"""The attention that queries give each row, in torch, against float64 arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

from minikv import kernels


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("keys", [40, 2300])
def test_observation(window: int | None, keys: int) -> None:
    """Two parts, the first with missing rows; more keys than a block holds."""
    heads, group, rows, size = 3, 2, 6, 8
    generator = torch.Generator().manual_seed(keys)
    q = torch.randn(heads, group, rows, size, generator=generator) * 2
    k = torch.randn(heads, keys, size, generator=generator)
    pos = torch.arange(keys).expand(heads, keys).clone()
    pos[1, 3:20] = -1
    at = torch.arange(keys - rows, keys)
    cut = keys - 11
    mass, squares = kernels.observe(
        q.permute(2, 0, 1, 3), at, [(k[:, :cut], pos[:, :cut]), (k[:, cut:], pos[:1, cut:])], window
    )
    distance = at[None, :, None] - pos[:, None]
    seen = (distance >= 0) & (pos >= 0)[:, None]
    if window is not None:
        seen &= distance < window
    logits = torch.einsum("hgtd,hnd->hgtn", q.double(), k.double()) / math.sqrt(size)
    p = logits.masked_fill(~seen[:, None], -math.inf).softmax(-1)
    torch.testing.assert_close(mass.double(), p.sum(2), rtol=1e-5, atol=1e-6)
    want = p.mean(1).square().sum(1)
    torch.testing.assert_close(squares.double(), want, rtol=1e-5, atol=1e-6)
