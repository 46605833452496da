"""Products of few rows and a matrix, in C: `product.c` behind the signatures of the twins."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from minikv.kernels.cpu.build import library
from minikv.kernels.torch import reference


@cache
def _bound() -> ctypes.CDLL:
    found, why = library()
    assert found is not None, why
    found.minikv_int8_product.argtypes = [c_int64] * 3 + [c_void_p] * 4
    found.minikv_row_product.argtypes = [c_int64] * 2 + [c_void_p] * 3
    found.minikv_int8_product.restype = ctypes.c_int
    found.minikv_row_product.restype = None
    found.minikv_threads.restype = ctypes.c_int
    return found


def threads() -> int:
    """Threads that a product is shared by."""
    found: int = _bound().minikv_threads()
    return found


def _taken(x: Tensor, matrix: Tensor, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether the C can take rows of bfloat16 and this matrix. The twin says what is wrong."""
    return (
        x.dtype == torch.bfloat16
        and matrix.dtype == dtype
        and x.is_cpu
        and matrix.is_cpu
        and x.shape[-1] == matrix.shape[1]
        and x.is_contiguous()
        and matrix.is_contiguous()
    )


def int8_product(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """See `reference.int8_product`. Activations are rounded to 16 bits, 256 columns to a scale, and
    multiplied as integers."""
    fits = scale.dtype == torch.bfloat16 and scale.is_contiguous() and len(scale) == len(codes)
    if not fits or not _taken(x, codes, torch.int8):
        return reference.int8_product(x, codes, scale)
    out = torch.empty((x.shape[0], codes.shape[0]), dtype=x.dtype, device=x.device)
    failed = _bound().minikv_int8_product(
        x.shape[0],
        x.shape[1],
        codes.shape[0],
        x.data_ptr(),
        codes.data_ptr(),
        scale.data_ptr(),
        out.data_ptr(),
    )
    if failed:
        raise MemoryError("a product found no memory")
    return out


def row_product(x: Tensor, weight: Tensor) -> Tensor:
    """See `reference.row_product`. Summed in float32, in another order than torch's."""
    if not _taken(x, weight) or x.shape[0] != 1:
        return reference.row_product(x, weight)
    out = torch.empty((1, weight.shape[0]), dtype=x.dtype, device=x.device)
    _bound().minikv_row_product(
        weight.shape[1], weight.shape[0], x.data_ptr(), weight.data_ptr(), out.data_ptr()
    )
    return out
