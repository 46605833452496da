"""The row of a new token, in C: `append.c`. Other dtypes and strides: `torch/append.py`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int, c_int64, c_void_p
from functools import cache

from torch import Tensor

from minikv.kernels.cpu.binding import KINDS, address, loaded
from minikv.kernels.torch import append as plain_torch


@cache
def _library() -> ctypes.CDLL:
    """The library, the arguments of its functions declared."""
    found = loaded()
    p, i, n = c_void_p, c_int, c_int64
    found.minikv_append.argtypes = [i, i, i, i, p, n, p, n, p, p, p, p, p, p, p, i, p, p]
    found.minikv_append.restype = None
    found.minikv_advance.argtypes = [n, i] + [p] * 9
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
    count = len(blank)
    columns = (c_void_p * count)(*(column.data_ptr() for column in blank))
    sizes = (ctypes.c_int32 * count)(*(column.itemsize for column in blank))
    _library().minikv_append(
        kind,
        coded,
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
        count,
        columns,
        sizes,
    )


def advance(
    accepted: Tensor,
    start: Tensor,
    length: Tensor,
    cap: Tensor,
    free_slot: Tensor,
    position: Tensor,
    count: Tensor,
    slot: Tensor,
    overwritten: Tensor,
    *,
    before: bool,
) -> None:
    """See `torch.append.advance`."""
    _library().minikv_advance(
        length.numel(),
        before,
        accepted.data_ptr(),
        start.data_ptr(),
        length.data_ptr(),
        cap.data_ptr(),
        free_slot.data_ptr(),
        position.data_ptr(),
        count.data_ptr(),
        slot.data_ptr(),
        overwritten.data_ptr(),
    )
