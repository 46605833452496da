"""Attention of a prompt's queries over the rows that are left from earlier turns. Every head has
its own number of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from minikv.kernels.attention.plain import rows_attention, visible_attention


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
    """Attention over the segment of each head. All its rows are older than the queries.

    q [H, G, T, D]; k, v [R, D]; start, length, free_slot int64 [H]: head h has rows start[h] ..
    start[h] + length[h] - 1, but not row free_slot[h] (-1: none). No length exceeds `max_length`.
    With a window, query i sees row j iff q_pos[i] - pos[j] < window; pos int32 [R], q_pos int64
    [T]. Results as in `rows_attention`; a query that sees no row gets zeros and a log-sum-exp of
    -inf.
    """
    tables = torch.stack((start, length, free_slot), 1)
    return head_by_head(q, k, v, tables, pos, q_pos, window, rows_attention)


def head_by_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    pos: Tensor | None,
    q_pos: Tensor | None,
    window: int | None,
    attend: Callable[..., tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """`ragged_prefill` with one call of `attend`, a form of `rows_attention`, per head.

    tables int64 [H, 3]: start, length and free_slot.
    """
    parts = []
    for h, (begin, count, free) in enumerate(tables.tolist()):
        rows: slice | Tensor = slice(begin, begin + count)
        if begin <= free < begin + count:
            rows = torch.arange(begin, begin + count - 1, device=q.device)
            rows += rows >= free
            count -= 1
        one = q[h : h + 1]
        if not count:
            lse = torch.full(one.shape[:3], -math.inf, device=q.device)
            parts.append((torch.zeros_like(one), lse))
        elif window is None:
            parts.append(attend(one, k[rows][None], v[rows][None]))
        else:
            assert pos is not None
            assert q_pos is not None
            at = pos[rows].to(torch.int64)[None]
            parts.append(visible_attention(one, k[rows][None], v[rows][None], q_pos, at, window))
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
