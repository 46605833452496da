"""Products of packed weights and activations quantized to int8, in C: `integer.c`. Specification:
`integer.py`."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from minikv.kernels.native.binding import loaded, plain

_TILE = 64  # rows that the layout of four bits is padded to
_GROUP = 128  # the most columns of a group there


@cache
def _library() -> ctypes.CDLL:
    """The library, the arguments of its functions declared."""
    found = loaded()
    found.minikv_int8_product.argtypes = [c_int64] * 4 + [c_void_p] * 4
    found.minikv_int4_product.argtypes = [c_int64] * 7 + [c_void_p] * 4
    found.minikv_int8_product.restype = found.minikv_int4_product.restype = ctypes.c_int
    return found


def _room(x: Tensor, columns: int, outs: int, out: Tensor | None) -> Tensor:
    """Where the result goes: the first rows of `out`, or new memory."""
    assert x.dtype is torch.bfloat16
    assert x.is_cpu
    assert x.shape[1] == columns
    if out is None:
        return x.new_empty(x.shape[0], outs)
    room = out[: x.shape[0]]
    assert plain(torch.bfloat16, room)
    assert room.shape == (x.shape[0], outs)
    return room


def int8_product(x: Tensor, codes: Tensor, scale: Tensor, out: Tensor | None = None) -> Tensor:
    """See `integer.int8_product`. The result is written to the first rows of `out` [>= t, m],
    if that is given. Raises MemoryError."""
    outs, columns = codes.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    assert plain(torch.int8, codes)
    assert plain(torch.bfloat16, scale)
    assert scale.shape == (outs,)
    room = _room(x, columns, outs, out)
    failed = _library().minikv_int8_product(
        x.shape[0],
        columns,
        outs,
        x.stride(0),
        x.data_ptr(),
        codes.data_ptr(),
        scale.data_ptr(),
        room.data_ptr(),
    )
    if failed:
        raise MemoryError("a product found no memory")
    return room


def int4_product(
    x: Tensor, packed: Tensor, scales: Tensor, half: int, outs: int, out: Tensor | None = None
) -> Tensor:
    """See `integer.int4_product`; N is a multiple of 64, a group has 32, 64 or 128 columns.
    The result is written to the first rows of `out` [>= t, outs], if given. Raises MemoryError."""
    groups, padded, _ = scales.shape
    columns = 2 * packed.shape[1]
    group = columns // groups
    x = x if x.stride(1) == 1 else x.contiguous()
    assert plain(torch.uint8, packed)
    assert plain(torch.bfloat16, scales)
    assert scales.shape == (groups, len(packed), 2)
    assert padded == -(-outs // _TILE) * _TILE
    assert group * groups == columns
    assert group in (32, 64, _GROUP)
    assert half in (16, 32)
    room = _room(x, columns, outs, out)
    failed = _library().minikv_int4_product(
        x.shape[0],
        columns,
        outs,
        x.stride(0),
        group,
        half,
        padded,
        x.data_ptr(),
        packed.data_ptr(),
        scales.data_ptr(),
        room.data_ptr(),
    )
    if failed:
        raise MemoryError("a product found no memory")
    return room
