"""Join attention over disjoint sets of rows, in C (`merge.c`). `torch/attention.py` takes other
dtypes, more than 8 parts and heads of more than 256."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from minikv.kernels.attention import plain as plain_torch
from minikv.kernels.native.binding import KINDS, loaded

_PARTS = 8
_MAX_HEAD_DIM = 256

_Addresses = c_void_p * _PARTS
_Shape = c_int64 * (9 + 6 * _PARTS)
"""`Shape` of merge.c."""


@cache
def _library() -> ctypes.CDLL:
    """The library, the arguments of its functions declared."""
    found = loaded()
    found.minikv_merge.argtypes = [_Addresses, _Addresses, c_void_p, c_void_p, _Shape]
    found.minikv_merge.restype = None
    return found


def merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """See `torch.attention.merge`."""
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
    shape = _Shape(
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
