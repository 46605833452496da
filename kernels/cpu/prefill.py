"""Attention of a prompt's queries, in C: `prefill.c` behind the signature of the torch twin.

What the C does not take goes to the twin: other dtypes than bfloat16, heads whose size is no
multiple of 16 or above 256, processors without AVX-512's bf16 products.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from minikv.kernels.cpu.build import library
from minikv.kernels.torch import reference

_STEP = 16
_WIDEST = 256
_NO_MEMORY = 2


# H, G, T, N, D, first; q's strides of H, G, T, k's and v's of H, N, and the result's of H, G, T.
_Shape = c_int64 * 16


@cache
def _bound() -> ctypes.CDLL | None:
    """The library, its arguments declared; None where it cannot compute here."""
    found, _ = library()
    if found is None or not found.minikv_rows_attention_available():
        return None
    found.minikv_rows_attention.argtypes = [c_void_p] * 5 + [_Shape]
    found.minikv_rows_attention.restype = c_int
    return found


def available() -> bool:
    """The C computes here: there is a library, and the processor has the instructions."""
    return _bound() is not None


def rows_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """See `reference.rows_attention`. In memory the mixed values are [T, H, G, D]."""
    found = _attend(q, k, v, 1 if causal else k.shape[1])
    return reference.rows_attention(q, k, v, causal=causal) if found is None else found


def last_rows_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.last_rows_attention`. At once: there is nothing to merge."""
    found = _attend(q, k, v, k.shape[1] - q.shape[2] + 1)
    return reference.last_rows_attention(q, k, v) if found is None else found


def segments_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    length: Tensor,
    hole: Tensor,
    most: int,
    *,
    pos: Tensor | None = None,
    q_pos: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.segments_attention`."""
    tables = torch.stack((start, length, hole), 1)
    return reference.segments_by_head(q, k, v, tables, pos, q_pos, window, rows_attention)


def _attend(q: Tensor, k: Tensor, v: Tensor, first: int) -> tuple[Tensor, Tensor] | None:
    """Query i over the rows below first + i; None: the C does not take it."""
    heads, group, rows, size = q.shape
    keys = k.shape[1]
    alike = all(x.dtype == torch.bfloat16 and x.device.type == "cpu" for x in (q, k, v))
    dense = q.stride(3) == k.stride(2) == v.stride(2) == 1
    if not (alike and dense and q.numel() and keys and first > 0):
        return None
    found = _bound() if size % _STEP == 0 and size <= _WIDEST else None
    if found is None:
        return None
    out = torch.empty((rows, heads, group, size), dtype=q.dtype, device=q.device)
    out = out.permute(1, 2, 0, 3)
    lse = torch.empty((heads, group, rows), dtype=torch.float32, device=q.device)
    shape = _Shape(
        heads,
        group,
        rows,
        keys,
        size,
        first,
        *q.stride()[:3],
        *k.stride()[:2],
        *v.stride()[:2],
        *out.stride()[:3],
    )
    failed = found.minikv_rows_attention(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), shape
    )
    if failed == _NO_MEMORY:
        raise MemoryError("attention found no memory")
    return out, lse
