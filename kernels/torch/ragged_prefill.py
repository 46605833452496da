"""Attention of a prompt's queries over rows that are left of earlier turns: every head has its own
number of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minikv.kernels.torch.attention import visible_attention


def ragged_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    length: Tensor,
    free_slot: Tensor,
    max_length: int,
    *,
    pos: Tensor | None = None,
    q_pos: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over the segment of each head. All its rows come before all queries.

    q [H, G, T, D]; k, v [R, D]; start, length, free_slot int64 [H]: head h has rows start[h] ..
    start[h] + length[h] - 1 without row free_slot[h] (-1: none). No length exceeds `max_length`.
    With a window, query i sees row j iff q_pos[i] - pos[j] < window; pos int32 [R], q_pos int64
    [T]. Results as in `rows_attention`; a query that sees no row gets zeros and a log-sum-exp of
    -inf.
    """
    parts = []
    for h, (begin, count, free) in enumerate(torch.stack((start, length, free_slot), 1).tolist()):
        rows = torch.arange(begin, begin + count, device=q.device)
        rows = rows[rows != free]
        at, now = torch.zeros_like(rows)[None], torch.zeros(q.shape[2], device=q.device)
        if window is not None and pos is not None and q_pos is not None:
            at, now = pos[rows].to(torch.int64)[None], q_pos
        one = q[h : h + 1]
        if len(rows):
            parts.append(visible_attention(one, k[None, rows], v[None, rows], now, at, window))
        else:
            lse = torch.full(one.shape[:3], -math.inf, device=q.device)
            parts.append((torch.zeros_like(one), lse))
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
