"""Write the row of a new token, in C (`append.c`). `torch/append.py` takes other dtypes and
strides."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from minikv.kernels.append import plain as plain_torch
from minikv.kernels.native.binding import KINDS, address, loaded, plain


@cache
def _library() -> ctypes.CDLL:
    """The library, the arguments of its functions declared."""
    found = loaded()
    p, i, n = c_void_p, c_int, c_int64
    found.minikv_append.argtypes = [i, i, i, p, n, p, n, p, p, p, p, p, p, p, i, p, p]
    found.minikv_append.restype = None
    found.minikv_rotate_append.argtypes = [i, i, i, i, p, p, p, p, p, p, p, p, p, p, i, p, p, p]
    found.minikv_rotate_append.restype = None
    found.minikv_advance.argtypes = [n, i] + [p] * 7
    found.minikv_advance.restype = None
    return found


def append(
    key: Tensor,
    value: Tensor,
    slot: Tensor,
    position: Tensor,
    k: Tensor,
    v: Tensor,
    pos: Tensor,
    blank: Sequence[Tensor],
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """See `torch.append.append`."""
    kind, coded = KINDS.get(key.dtype, -1), k_scale is not None
    dense = key.stride(1) == 1 == value.stride(1)
    if kind < 0 or not dense or not (coded or k.dtype == key.dtype):
        plain_torch.append(key, value, slot, position, k, v, pos, blank, k_scale, v_scale)
        return
    _library().minikv_append(
        kind,
        len(slot),
        key.shape[1],
        key.data_ptr(),
        key.stride(0),
        value.data_ptr(),
        value.stride(0),
        slot.data_ptr(),
        position.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        pos.data_ptr(),
        address(k_scale),
        address(v_scale),
        *_columns(blank),
    )


def _columns(blank: Sequence[Tensor]) -> tuple[int, Any, Any]:
    """How many columns, their addresses, and the bytes of a number of each."""
    count = len(blank)
    addresses = (c_void_p * count)(*(column.data_ptr() for column in blank))
    return count, addresses, (ctypes.c_int32 * count)(*(column.itemsize for column in blank))


def rotate_append(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot: Tensor,
    position: Tensor,
    k: Tensor,
    v: Tensor,
    pos: Tensor,
    blank: Sequence[Tensor],
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `torch.append.rotate_append`."""
    heads, size = len(slot), qkv.shape[1]
    kind, coded = KINDS.get(qkv.dtype, -1), k_scale is not None
    if kind < 0 or not plain(qkv.dtype, qkv, cos, sin) or not (coded or k.dtype == qkv.dtype):
        return plain_torch.rotate_append(
            qkv, cos, sin, slot, position, k, v, pos, blank, k_scale, v_scale
        )
    turned = torch.empty((len(qkv) - heads, size), dtype=qkv.dtype)
    _library().minikv_rotate_append(
        kind,
        heads,
        len(qkv),
        size,
        qkv.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        slot.data_ptr(),
        position.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        pos.data_ptr(),
        address(k_scale),
        address(v_scale),
        *_columns(blank),
        turned.data_ptr(),
    )
    return turned[:-heads].view(heads, -1, size), turned[-heads:]


def advance(
    start: Tensor,
    length: Tensor,
    cap: Tensor,
    free_slot: Tensor,
    position: Tensor,
    count: Tensor,
    slot: Tensor,
    *,
    before: bool,
) -> None:
    """See `torch.append.advance`."""
    tensors = start, length, cap, free_slot, position, count, slot
    _library().minikv_advance(length.numel(), before, *(t.data_ptr() for t in tensors))
