"""The attention that queries give each row, in torch, against float64 arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from prompts import observed, weights

from minikv import kernels
from minikv.kernels.mass import plain as attention_mass


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
    p, lse = weights(q, k, at, pos, window)
    parts = [(k[:, :cut], pos[:, :cut]), (k[:, cut:], pos[:1, cut:])]
    known = attention_mass.rows_lse(q, at, parts, window)
    torch.testing.assert_close(known.double(), lse, rtol=1e-5, atol=1e-6)
    mass, squares = observed(kernels.add_attention_mass, q, at, parts, window, known)
    torch.testing.assert_close(mass.double(), p.sum(2), rtol=1e-5, atol=1e-6)
    want = p.mean(1).square().sum(1)
    torch.testing.assert_close(squares.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("rows", [7, 150])
def test_the_peak_of_a_part(window: int | None, scaled: bool, rows: int) -> None:
    """Three parts, of which one is asked for: missing rows, listed rows of an arena, and queries
    that see a part of their own; more logits than a block holds."""
    heads, group, size = 3, 2, 8
    generator = torch.Generator().manual_seed(rows)
    q = torch.randn(heads, group, rows, size, generator=generator) * 2
    first, chunk = torch.randn(2, heads, 4, size), torch.randn(heads, 1500, size)
    own = torch.randn(heads, rows, size, generator=generator)
    arena = torch.cat((torch.zeros(5, size), first[0].flatten(0, 1)))
    index = torch.arange(heads * 4).view(heads, 4) + 5
    first_pos = torch.tensor([[0, 1, 2, -1], [0, 1, -1, -1], [0, 1, 2, 3]])
    chunk_pos, at = torch.arange(10, 1510)[None], torch.arange(1600, 1600 + rows)
    scale = torch.rand(rows, generator=generator) + 0.1 if scaled else None
    found = kernels.peak_attention(
        q, at, [(arena, first_pos, index), (chunk, chunk_pos), (own, at[None])], 1, window, scale
    )
    keys = torch.cat((first[0], chunk, own), 1).double()
    pos = torch.cat((first_pos, torch.cat((chunk_pos, at[None]), 1).expand(heads, -1)), 1)
    distance = at[None, :, None] - pos[:, None]
    seen = (distance >= 0) & (pos >= 0)[:, None]
    if window is not None:
        seen &= distance < window
    logits = torch.einsum("hgtd,hnd->hgtn", q.double(), keys) / math.sqrt(size)
    p = logits.masked_fill(~seen[:, None], -math.inf).softmax(-1)
    p = p if scale is None else p * scale.double()[:, None]
    want = p[..., 4:1504].amax(2)
    torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-7)
    assert bool((found > 0).any())
    if window is None:  # then every query sees the whole part
        lse = logits.masked_fill(~seen[:, None], -math.inf).logsumexp(-1).float()
        parts = [(arena, first_pos, index), (chunk, chunk_pos), (own, at[None])]
        known = kernels.peak_attention(q, at, parts, 1, window, scale, lse)
        torch.testing.assert_close(known, found, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("keys", [40, 2300])
def test_what_each_query_gives_one_head_sums_to_the_observation(
    window: int | None, keys: int
) -> None:
    """Of three parts: rows of an arena, rows with padding, and rows whose positions all heads
    share."""
    heads, group, rows, size = 3, 2, 6, 8
    generator = torch.Generator().manual_seed(keys)
    q = torch.randn(heads, group, rows, size, generator=generator) * 2
    arena = torch.randn(50, size, generator=generator)
    index = torch.randint(50, (heads, 7), generator=generator)
    k = torch.randn(heads, keys, size, generator=generator)
    pos = torch.arange(7, 7 + keys).expand(heads, keys).clone()
    pos[1, 3:20] = -1
    at, cut = torch.arange(7 + keys - rows, 7 + keys), keys - 11
    parts: list[kernels.Part] = [
        (arena, torch.arange(7).expand(heads, 7), index),
        (k[:, :cut], pos[:, :cut]),
        (k[:, cut:], pos[:1, cut:]),
    ]
    lse = attention_mass.rows_lse(q, at, parts, window)
    mass, squares = observed(kernels.add_attention_mass, q, at, parts, window, lse)
    for h in range(heads):
        found = kernels.each_attention(q, at, parts, window, lse, slice(h, h + 1))[0]
        assert found.shape == (group, rows, 7 + keys)
        torch.testing.assert_close(found.sum(-1), torch.ones(group, rows))
        torch.testing.assert_close(found.sum(1), mass[h])
        torch.testing.assert_close(found.mean(0).square().sum(0), squares[h])
