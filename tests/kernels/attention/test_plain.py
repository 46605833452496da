"""Attention of prompts in torch against float64 arithmetic, on odd sizes."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from minikv import kernels
from minikv.kernels.attention import plain as attention

SIZES = [
    (1, 1, 1, 1, 8),
    (3, 2, 5, 17, 8),
    (5, 3, 33, 70, 16),
    (2, 9, 7, 3, 32),
    (1, 4, 64, 300, 80),
]


def make(heads: int, group: int, rows: int, keys: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(heads + 7 * rows)
    q = torch.randn(heads, group, rows, size, generator=generator)
    k, v = (torch.randn(heads, keys, size, generator=generator) for _ in range(2))
    return q * 2, k, v


def truth(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    logits = torch.einsum("hgtd,hnd->hgtn", q.double(), k.double()) / math.sqrt(q.shape[-1])
    logits = logits.masked_fill(~seen[:, None], -math.inf)
    p = logits.softmax(-1).nan_to_num(0.0)
    return torch.einsum("hgtn,hnd->hgtd", p, v.double()), logits.logsumexp(-1)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("causal", [False, True])
def test_rows(sizes: tuple[int, ...], causal: bool) -> None:
    q, k, v = make(*sizes)
    rows, keys = q.shape[2], k.shape[1]
    if causal:
        k, v = make(*sizes[:3], rows, sizes[4])[1:]
        keys = rows
    seen = torch.ones(len(k), rows, keys, dtype=torch.bool)
    out, lse = kernels.rows_attention(q, k, v, causal=causal)
    want, sums = truth(q, k, v, seen.tril() if causal else seen)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), sums, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("window", [None, 1, 6])
def test_visible_rows_by_position(sizes: tuple[int, ...], window: int | None) -> None:
    """Keys in any order, some missing; a missing one may hold NaN."""
    q, k, v = make(*sizes)
    rows, keys = q.shape[2], k.shape[1]
    generator = torch.Generator().manual_seed(5)
    pos = torch.stack([torch.randperm(keys + 3, generator=generator)[:keys] for _ in k])
    gone = torch.rand(pos.shape, generator=generator) < 0.3
    pos = pos.masked_fill(gone, -1)
    k, v = k.masked_fill(gone[..., None], math.nan), v.masked_fill(gone[..., None], math.nan)
    at = torch.arange(2, 2 + rows)
    distance = at[None, :, None] - pos[:, None]
    seen = (distance >= 0) & (pos >= 0)[:, None]
    if window is not None:
        seen &= distance < window
    out, lse = kernels.visible_attention(q, k, v, at, pos, window)
    want, sums = truth(q, k.nan_to_num(0), v.nan_to_num(0), seen)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), sums, rtol=1e-5, atol=1e-5)
    # The arithmetic written out, which is what runs where there is no such kernel.
    out, lse = attention.masked_attention(q, k, v, seen)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), sums, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_visible_rows_in_other_dtypes_and_blocks(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (t.to(dtype) for t in make(3, 2, 40, 90, 16))
    at, pos = torch.arange(60, 100), torch.arange(90)[None]
    monkeypatch.setattr(attention, "_LOGITS", 7 * 90)
    out, lse = kernels.visible_attention(q, k, v, at, pos, 50)
    distance = at[:, None] - pos
    want, sums = truth(q, k, v, ((distance >= 0) & (distance < 50)).expand(3, -1, -1))
    assert out.dtype == dtype
    loose = 1e-12 if dtype == torch.float64 else 3e-2
    torch.testing.assert_close(out.double(), want, rtol=loose, atol=loose)
    torch.testing.assert_close(lse.double(), sums, rtol=loose, atol=loose)


@pytest.mark.parametrize("sizes", SIZES)
def test_parts_join_to_the_whole(sizes: tuple[int, ...]) -> None:
    q, k, v = make(*sizes)
    keys = k.shape[1]
    whole, _ = kernels.rows_attention(q, k, v)
    at = torch.full((q.shape[2],), keys)
    nothing = torch.full((1, keys), -1)
    parts = [kernels.visible_attention(q, k, v, at, nothing, None)]
    cuts = sorted({0, keys // 3, keys})
    parts += [kernels.rows_attention(q, k[:, a:b], v[:, a:b]) for a, b in pairwise(cuts)]
    torch.testing.assert_close(kernels.merge(parts)[0], whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "capability", "kernel"),
    [
        (torch.bfloat16, (7, 5), None),
        (torch.float16, (7, 5), "efficient"),
        (torch.bfloat16, (8, 0), "flash"),
        (torch.float32, (9, 0), "efficient"),
    ],
)
def test_which_of_the_librarys_kernels_a_gpu_takes(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    capability: tuple[int, int],
    kernel: str | None,
) -> None:
    """There is none for bfloat16 on a GPU that does not multiply it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    q, k, v = (t.to(dtype) for t in make(2, 2, 4, 8, 16))
    if kernel is None:
        assert attention.cuda_attention(q, k, v, causal=False) is None
        return
    with pytest.raises(NotImplementedError, match=f"_{kernel}_attention_forward"):
        attention.cuda_attention(q, k, v, causal=False)
