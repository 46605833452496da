"""Matrix products of few rows, in C: `product.c`. Other dtypes and strides: `torch/product.py`."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from minikv.kernels.cpu.binding import loaded
from minikv.kernels.torch import product as plain_torch


@cache
def _library() -> ctypes.CDLL:
    """The library, the arguments of its functions declared."""
    found = loaded()
    found.minikv_int8_product.argtypes = [c_int64] * 3 + [c_void_p] * 4
    found.minikv_row_product.argtypes = [c_int64] * 2 + [c_void_p] * 3
    found.minikv_int8_product.restype = ctypes.c_int
    found.minikv_row_product.restype = None
    found.minikv_threads.restype = ctypes.c_int
    return found


def threads() -> int:
    """The number of threads that share a product."""
    found: int = _library().minikv_threads()
    return found


def _taken(x: Tensor, matrix: Tensor, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether C takes these rows and this matrix. If not, torch computes, or raises an error."""
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
    """See `torch.product.int8_product`. Activations are rounded to 16 bits, with a scale for 256
    columns, and multiplied as integers."""
    fits = scale.dtype == torch.bfloat16 and scale.is_contiguous() and len(scale) == len(codes)
    if not fits or not _taken(x, codes, torch.int8):
        return plain_torch.int8_product(x, codes, scale)
    out = torch.empty((x.shape[0], codes.shape[0]), dtype=x.dtype, device=x.device)
    failed = _library().minikv_int8_product(
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
    """See `torch.product.row_product`. Summed in float32, in another order than torch's."""
    if not _taken(x, weight) or x.shape[0] != 1:
        return plain_torch.row_product(x, weight)
    out = torch.empty((1, weight.shape[0]), dtype=x.dtype, device=x.device)
    _library().minikv_row_product(
        weight.shape[1], weight.shape[0], x.data_ptr(), weight.data_ptr(), out.data_ptr()
    )
    return out
