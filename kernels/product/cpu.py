"""Products of one row and a matrix, in C (`product.c`). `plain.py` takes other dtypes and
strides."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from minikv.kernels.native.binding import loaded, plain
from minikv.kernels.product import plain as plain_torch


@cache
def _library() -> ctypes.CDLL:
    """The library, the arguments of its functions declared."""
    found = loaded()
    found.minikv_row_product.argtypes = [c_int64] * 2 + [c_void_p] * 3
    found.minikv_row_product.restype = None
    found.minikv_threads.restype = ctypes.c_int
    return found


def threads() -> int:
    """How many threads compute a product together."""
    found: int = _library().minikv_threads()
    return found


def _taken(x: Tensor, matrix: Tensor) -> bool:
    """Whether C takes this row and this matrix. If not, torch computes or raises an error."""
    return plain(torch.bfloat16, x, matrix) and x.shape == (1, matrix.shape[1])


def row_product(x: Tensor, weight: Tensor) -> Tensor:
    """See `plain.row_product`. Summed in float32, in another order than torch's."""
    if not _taken(x, weight):
        return plain_torch.row_product(x, weight)
    out = torch.empty((1, weight.shape[0]), dtype=x.dtype, device=x.device)
    _library().minikv_row_product(
        weight.shape[1], weight.shape[0], x.data_ptr(), weight.data_ptr(), out.data_ptr()
    )
    return out
