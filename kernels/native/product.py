"""Products of few rows and a matrix, in C: `product.c` behind the signatures of the twins."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from minikv.kernels import reference
from minikv.kernels.native.build import library


@cache
def _bound() -> ctypes.CDLL:
    found, why = library()
    assert found is not None, why
    found.minikv_int8_product.argtypes = [c_int64] * 3 + [c_void_p] * 4
    found.minikv_row_product.argtypes = [c_int64] * 2 + [c_void_p] * 3
    found.minikv_int8_product.restype = ctypes.c_int
    found.minikv_row_product.restype = None
    return found


def int8_product(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """See `reference.int8_product`. Activations are rounded to 16 bits, 256 columns to a scale, and
    multiplied as integers."""
    plain = x.is_contiguous() and codes.is_contiguous() and scale.is_contiguous()
    if not plain or x.dtype != torch.bfloat16 or scale.dtype != torch.bfloat16:
        return reference.int8_product(x, codes, scale)
    out = torch.empty((x.shape[0], codes.shape[0]), dtype=x.dtype, device=x.device)
    failed = _bound().minikv_int8_product(
        x.shape[0], x.shape[1], codes.shape[0], x.data_ptr(), codes.data_ptr(), scale.data_ptr(),
        out.data_ptr(),
    )  # fmt: skip
    if failed:
        raise MemoryError("a product found no memory")
    return out


def row_product(x: Tensor, weight: Tensor) -> Tensor:
    """See `reference.row_product`. Summed in float32, in another order than torch's."""
    if not (x.is_contiguous() and weight.is_contiguous()) or weight.dtype != torch.bfloat16:
        return reference.row_product(x, weight)
    out = torch.empty((1, weight.shape[0]), dtype=x.dtype, device=x.device)
    _bound().minikv_row_product(
        weight.shape[1], weight.shape[0], x.data_ptr(), weight.data_ptr(), out.data_ptr()
    )
    return out
