"""A matrix of weights in the form that the C kernels take: `Matrix` of row.h."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch

from minikv.kernels.native.binding import address, plain
from minikv.kernels.product import matrix

PLAIN, EIGHT, FOUR = range(3)
"""The formats of weights, with their numbers in `row.h`."""


class Matrix(ctypes.Structure):
    """Sizes and addresses of weights [outs, n]. The caller must keep the tensors alive."""

    _fields_ = (
        *((name, c_int64) for name in ("form", "n", "outs", "group", "half", "stride")),
        *((name, c_void_p) for name in ("weights", "scales", "bias")),
    )


def addresses(given: matrix.Matrix) -> Matrix | None:
    """The matrix in the form that C takes; None if C cannot take it."""
    weights, scales = given.weights, given.scales
    group = stride = 0
    beside = [part for part in (scales, given.bias) if part is not None]
    if not plain(weights.dtype, weights) or not plain(torch.bfloat16, *beside):
        return None
    if scales is None:
        form = PLAIN
        if weights.dtype is not torch.bfloat16:
            return None
    elif weights.dtype is torch.int8:
        form = EIGHT
    else:
        form, stride = FOUR, scales.shape[1]
        group = given.n // scales.shape[0]
    return Matrix(
        form,
        given.n,
        given.outs,
        group,
        given.half,
        stride,
        weights.data_ptr(),
        address(scales),
        address(given.bias),
    )
