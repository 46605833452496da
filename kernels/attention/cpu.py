"""Attention of a prompt's queries, in C, in three ways: with bfloat16 tiles (prefill_tiles.c) or
bfloat16 vectors (prefill.c), which a processor may lack, or with floats (prefill_float.h). `choice`
says which is fastest.

They take bfloat16 and float32 (always multiplied as floats), and heads whose size is a multiple of
16 up to 256. Everything else goes to plain.py.

Results over disjoint sets of rows are joined in C too (`merge.c`), of up to 8 parts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import cast

import torch
from torch import Tensor

from minikv.kernels.attention import plain as plain_torch
from minikv.kernels.decode.plain import Segments
from minikv.kernels.native import choice
from minikv.kernels.native.binding import KINDS, loaded
from minikv.kernels.native.build import library

_MULTIPLE = 16
_MAX_HEAD_DIM = 256
_NO_MEMORY = 2
_FLOAT32 = "minikv_rows_attention_float32"

Attend = Callable[..., int]
"""A C function: addresses of q, k, v, the output and the log-sum-exps, and a `_Shape` -> 0 or
`_NO_MEMORY`."""

_Shape = c_int64 * 16
"""H, G, T, N, D, first; strides of q over H, G, T, of k and of v over H, N, of the output over
H, G, T."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """One of the three ways, by the name of its function in the library."""

    symbol: str
    """The name of the function for bfloat16."""

    def available(self) -> bool:
        """Whether there is a library, and the processor has the instructions."""
        return _function(self.symbol) is not None

    def rows_attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False
    ) -> tuple[Tensor, Tensor]:
        """See `plain.rows_attention`. In memory the output is [T, H, G, D]."""
        found = self._attend(q, k, v, 1 if causal else k.shape[1])
        return plain_torch.rows_attention(q, k, v, causal=causal) if found is None else found

    def last_rows_attention(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `plain.last_rows_attention`. Computed at once, without `merge`."""
        found = self._attend(q, k, v, k.shape[1] - q.shape[2] + 1)
        return plain_torch.last_rows_attention(q, k, v) if found is None else found

    def ragged_prefill(
        self,
        q: Tensor,
        rows: Segments,
        free_slot: Tensor,
        q_pos: Tensor | None = None,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `plain.ragged_prefill`. Without a window, head by head in C."""
        return plain_torch.head_by_head(q, rows, free_slot, q_pos, window, self.rows_attention)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, first: int) -> tuple[Tensor, Tensor] | None:
        """Query i over rows 0 .. first + i - 1; None if C does not take these tensors."""
        heads, group, rows, size = q.shape
        keys = k.shape[1]
        alike = q.dtype == k.dtype == v.dtype and all(x.is_cpu for x in (q, k, v))
        dense = q.stride(3) == k.stride(2) == v.stride(2) == 1
        if not (alike and dense and q.numel() and keys and first > 0):
            return None
        symbol = {torch.bfloat16: self.symbol, torch.float32: _FLOAT32}.get(q.dtype)
        if symbol is None or size % _MULTIPLE or size > _MAX_HEAD_DIM:
            return None
        function = _function(symbol)
        if function is None:
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
        failed = function(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), shape
        )
        if failed == _NO_MEMORY:
            raise MemoryError("attention found no memory")
        return out, lse


TILES = Prefill("minikv_rows_attention_tiles")
BF16 = Prefill("minikv_rows_attention")
FLOAT = Prefill("minikv_rows_attention_float")
FORMS = {choice.C: BF16, choice.TILES: TILES, choice.FLOATS: FLOAT}
"""What `choice` calls them."""


@cache
def _function(symbol: str) -> Attend | None:
    """A function of the library, its arguments declared; None if this machine cannot run it."""
    found, _ = library()
    if found is None:
        return None
    if symbol in (TILES.symbol, BF16.symbol) and not getattr(found, f"{symbol}_available")():
        return None
    function = found[symbol]
    function.argtypes = [c_void_p] * 5 + [_Shape]
    function.restype = c_int
    return cast(Attend, function)


_PARTS = 8

_Addresses = c_void_p * _PARTS
_Joined = c_int64 * (9 + 6 * _PARTS)
"""`Shape` of merge.c."""


@cache
def _library() -> ctypes.CDLL:
    """The library, the arguments of its functions declared."""
    found = loaded()
    found.minikv_merge.argtypes = [_Addresses, _Addresses, c_void_p, c_void_p, _Joined]
    found.minikv_merge.restype = None
    return found


def merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """See `plain.merge`."""
    if len(parts) == 1:
        return parts[0]
    outs, lses = [out for out, _ in parts], [lse for _, lse in parts]
    heads, group, rows, size = outs[0].shape
    kind = outs[0].dtype
    fits = kind in KINDS and size <= _MAX_HEAD_DIM and len(parts) <= _PARTS
    fits = fits and all(x.dtype is kind and x.stride(3) == 1 and x.is_cpu for x in outs)
    if not fits or any(x.dtype is not torch.float32 for x in lses):
        return plain_torch.merge(parts)
    joined = torch.empty_like(outs[0])
    whole = torch.empty((heads, group, rows))
    none = [0] * 3 * (_PARTS - len(parts))
    shape = _Joined(
        heads,
        group,
        rows,
        size,
        len(parts),
        KINDS[kind],
        *joined.stride()[:3],
        *(step for x in outs for step in x.stride()[:3]),
        *none,
        *(step for x in lses for step in x.stride()),
    )
    _library().minikv_merge(
        _Addresses(*(x.data_ptr() for x in outs)),
        _Addresses(*(x.data_ptr() for x in lses)),
        joined.data_ptr(),
        whole.data_ptr(),
        shape,
    )
    return joined, whole
