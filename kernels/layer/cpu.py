"""The small operators of a layer, in C (`layer.c`). `plain.py` takes other dtypes and
strides."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from minikv.kernels.layer import plain as plain_torch
from minikv.kernels.native.binding import KINDS, address, loaded


@cache
def _library() -> ctypes.CDLL:
    """The library, the arguments of its functions declared."""
    found = loaded()
    p, i, n = c_void_p, c_int, c_int64
    found.minikv_add_norm.argtypes = [i, n, n, n, p, p, p, c_double, p]
    found.minikv_rotate.argtypes = [i, n, n, n, n, p, p, p, p]
    found.minikv_silu_mul.argtypes = [i, n, n, n, p]
    for name in ("add_norm", "rotate", "silu_mul"):
        getattr(found, f"minikv_{name}").restype = None
    return found


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """See `plain.add_norm`."""
    kind = KINDS.get(x.dtype, -1)
    dense = x.stride(1) == 1 and (y is None or (y.is_contiguous() and y.dtype == x.dtype))
    if kind < 0 or not dense or weight.dtype != x.dtype:
        return plain_torch.add_norm(x, y, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _library().minikv_add_norm(
        kind,
        x.shape[0],
        x.shape[1],
        x.stride(0),
        x.data_ptr(),
        address(y),
        weight.data_ptr(),
        eps,
        out.data_ptr(),
    )
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `plain.rotate`."""
    rows, heads, size = x.shape
    kind = KINDS.get(x.dtype, -1)
    dense = x.stride(2) == 1 and x.stride(1) == size and cos.is_contiguous() and sin.is_contiguous()
    if kind < 0 or not dense or not cos.dtype == sin.dtype == x.dtype:
        return plain_torch.rotate(x, cos, sin)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _library().minikv_rotate(
        kind,
        rows,
        heads,
        size,
        x.stride(0),
        x.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        out.data_ptr(),
    )
    return out


def silu_mul(both: Tensor) -> Tensor:
    """See `plain.silu_mul`."""
    kind, size = KINDS.get(both.dtype, -1), both.shape[1] // 2
    if kind < 0 or both.stride(1) != 1:
        return plain_torch.silu_mul(both)
    _library().minikv_silu_mul(kind, both.shape[0], size, both.stride(0), both.data_ptr())
    return both[:, :size]
