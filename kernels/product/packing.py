"""Pack weights to eight and four bits, in C: `packing.c`. The torch form is in models/linear.py."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from minikv.kernels.native.binding import loaded, plain

_TILE = 64  # rows, in packing.c
_GROUP = 128  # the most columns of a group there


@cache
def _library() -> ctypes.CDLL:
    """The library, the arguments of its functions declared."""
    found = loaded()
    found.minikv_pack_int8.argtypes = [c_int64] * 2 + [c_void_p] * 3
    found.minikv_pack_int4.argtypes = [c_int64] * 5 + [c_void_p] * 3
    found.minikv_unpack_int4.argtypes = [c_int64] * 5 + [c_void_p] * 3
    for name in ("pack_int8", "pack_int4", "unpack_int4"):
        getattr(found, f"minikv_{name}").restype = None
    return found


def pack_int8(weight: Tensor, codes: Tensor, scale: Tensor) -> None:
    """weight bfloat16 [n, in] -> codes int8 [n, in] and scale bfloat16 [n], which are written to.

    The scale of a row is its largest magnitude / 127.
    """
    rows, columns = weight.shape
    assert plain(torch.bfloat16, weight, scale)
    assert plain(torch.int8, codes)
    assert codes.shape == weight.shape
    assert scale.shape == (rows,)
    _library().minikv_pack_int8(
        rows, columns, weight.data_ptr(), codes.data_ptr(), scale.data_ptr()
    )


def pack_int4(weight: Tensor, packed: Tensor, scales: Tensor, half: int) -> None:
    """weight bfloat16 [n, in] -> packed uint8 [N, in / 2] and scales bfloat16 [in / group, N, 2],
    which are written to; N is n, up to a multiple of 64.

    A group's smallest and largest value are the first and the last of 16 steps. In a tile of 2 *
    half rows (32 or 64), byte i of a column has row i in its lower four bits and row half + i in
    the upper ones. Scales of rows beyond n are left as they are.
    """
    rows, columns = weight.shape
    groups, padded, _ = scales.shape
    group = columns // groups
    assert plain(torch.bfloat16, weight, scales)
    assert plain(torch.uint8, packed)
    assert padded == -(-rows // _TILE) * _TILE
    assert packed.shape == (padded, columns // 2)
    assert group * groups == columns
    assert group <= _GROUP
    assert half in (16, 32)
    _library().minikv_pack_int4(
        rows,
        columns,
        group,
        half,
        padded,
        weight.data_ptr(),
        packed.data_ptr(),
        scales.data_ptr(),
    )


def unpack_int4(packed: Tensor, scales: Tensor, half: int, out: Tensor) -> None:
    """Whole tiles of `pack_int4`, packed uint8 [n, in / 2], and their scales bfloat16
    [in / group, n, 2], contiguous but for the first dimension -> out bfloat16 [in, n], which is
    written to."""
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    groups = scales.shape[0]
    assert plain(torch.bfloat16, out)
    assert plain(torch.uint8, packed)
    assert scales.dtype is torch.bfloat16
    assert scales.device == packed.device
    assert scales.shape == (groups, rows, 2)
    assert scales.stride()[1:] == (2, 1)
    assert out.shape == (columns, rows)
    assert rows % _TILE == 0
    assert columns % groups == 0
    assert half in (16, 32)
    _library().minikv_unpack_int4(
        rows,
        columns,
        columns // groups,
        half,
        scales.stride(0) // 2,
        packed.data_ptr(),
        scales.data_ptr(),
        out.data_ptr(),
    )
