"""Weights as the C kernels take them: `Matrix` of row.h."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch

from minikv.kernels import matrix
from minikv.kernels.cpu.binding import address, plain

PLAIN, EIGHT, FOUR = range(3)
"""Forms of weights, by their numbers in `row.h`."""


class Matrix(ctypes.Structure):
    """Addresses of weights [outs, n], whose tensors must be kept elsewhere."""

    _fields_ = (
        *((name, c_int64) for name in ("form", "n", "outs", "group", "half", "stride")),
        *((name, c_void_p) for name in ("weights", "scales", "bias")),
    )


def addresses(given: matrix.Matrix) -> Matrix | None:
    """A matrix as C takes it; None if it does not."""
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
