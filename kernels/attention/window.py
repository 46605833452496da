"""Attention of a prompt's queries under a sliding window.

CUDA has kernels with a window. Elsewhere, attention is computed by kernels without one. The queries
are rows lo .. hi - 1, fewer than the window. They see three sets of rows. Each set is computed by a
kernel behind scaled_dot_product_attention, without a mask:

- the rows lo .. hi - 1 themselves, causally;
- the rows hi - window + 1 .. lo - 1 before them, which all queries see;
- hi - lo rows before those. Query lo + r sees all but the first r of them. With queries and keys
  both in reverse order, this is causal attention, too.

Every query sees a row of each set. The sets are joined by their log-sum-exp (`merge`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from minikv.kernels.attention.plain import cuda_attention, merge, rows_attention

Attend = Callable[..., tuple[Tensor, Tensor]]


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, attend: Attend = rows_attention
) -> tuple[Tensor, Tensor]:
    """Attention of the last T of N rows: row i sees rows max(0, i - window + 1) .. i.

    q [H, G, T, D], k and v [H, N, D], N >= T: any strides, but the last is 1. attend: the form of
    `rows_attention` to call. Results as in `rows_attention`. Needs no mask, and beside the results
    only copies of at most T rows.
    """
    if q.device.type == "cuda":
        fused = cuda_attention(q, k, v, causal=True, window=window)
        if fused is not None:
            return fused
    first = k.shape[1] - q.shape[2]
    parts = [
        _stretch(q[:, :, lo:hi], k[:, : first + hi], v[:, : first + hi], window, attend)
        for lo, hi in _stretches(first, q.shape[2], window)
    ]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def _stretches(first: int, rows: int, window: int) -> Iterator[tuple[int, int]]:
    """Divide `rows` queries, the first of which is row `first`: (begin, end) of each stretch.

    The first stretch is the queries that see all rows before them. The others have fewer rows than
    the window (one row if it is 1), are as few as possible, and have about the same size.
    """
    lo = min(max(0, window - first), rows)
    if lo:
        yield 0, lo
    if lo < rows:
        count = -(-(rows - lo) // max(1, window - 1))
        size = -(-(rows - lo) // count)
        for begin in range(lo, rows, size):
            yield begin, min(begin + size, rows)


def _stretch(q: Tensor, k: Tensor, v: Tensor, window: int, attend: Attend) -> tuple[Tensor, Tensor]:
    """`window_attention` of one stretch."""
    hi = k.shape[1]
    lo = hi - q.shape[2]
    begin = hi - window + 1 if hi > window else 0  # all queries see the rows from here on
    parts = [attend(q, k[:, lo:], v[:, lo:], causal=True)]
    if begin < lo:
        parts.append(attend(q, k[:, begin:lo], v[:, begin:lo]))
    if 0 < begin <= lo:  # a window of 1 has no such rows
        early = slice(lo - window + 1, begin)
        out, lse = attend(q.flip(2), k[:, early].flip(1), v[:, early].flip(1), causal=True)
        parts.append((out.flip(2), lse.flip(2)))
    return merge(parts)
