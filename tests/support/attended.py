"""A prompt's queries, keys and values as a prefill has them, and their attention in float64."""

from __future__ import annotations

import math

import torch
from prompts import weights
from tensors import randoms
from torch import Tensor

Pair = tuple[Tensor, Tensor]
"""What is mixed [H, G, T, D], and the log-sum-exps [H, G, T]."""


def make(
    *sizes: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, by: float = 2.0
) -> tuple[Tensor, Tensor, Tensor]:
    """q [H, G, T, D], k and v [H, N, D] as a prefill has them: queries [T, H, G, D] in memory, rows
    those of a longer buffer, with NaN beyond them. sizes: H, G, T, N and D."""
    heads, group, rows, keys, size = sizes
    q = randoms(seed, rows, heads, group, size, dtype=dtype, by=by)
    k, v = torch.full((2, heads, keys + 5, size), math.nan, dtype=dtype)
    for i, x in enumerate((k, v)):
        x[:, :keys] = randoms(seed + 1 + i, heads, keys, size, dtype=dtype)
    return q.permute(1, 2, 0, 3), k[:, :keys], v[:, :keys]


def mixed(q: Tensor, k: Tensor, v: Tensor, at: Tensor, pos: Tensor, window: int | None) -> Pair:
    """Of queries at these positions over rows at those; nothing of a row that is not there."""
    p, lse = weights(q, k, at, pos, window)
    return torch.einsum("hgtn,hnd->hgtd", p, v.double().nan_to_num(0.0)), lse


def truth(q: Tensor, k: Tensor, v: Tensor, first: int) -> Pair:
    """Query i sees the rows below first + i."""
    at, pos = first - 1 + torch.arange(q.shape[2]), torch.arange(k.shape[1])[None]
    return mixed(q, k, v, at, pos, None)


def last(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Pair:
    """Of queries that are those of the last rows."""
    rows, keys = q.shape[2], k.shape[1]
    return mixed(q, k, v, torch.arange(keys - rows, keys), torch.arange(keys)[None], window)
