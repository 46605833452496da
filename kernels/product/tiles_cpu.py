"""Products of many rows and packed weights, with bfloat16 tiles (AMX), in C: `product_tiles.c`.

Weights are unpacked to the numbers of `Linear.dense` of models/linear.py, except that the scale of
eight-bit weights multiplies the sums. Activations are not quantized; sums are float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from minikv.kernels.native.binding import loaded
from minikv.kernels.product import matrix
from minikv.kernels.product.matrix_cpu import PLAIN, addresses

_NO_MEMORY = 2


@cache
def _library() -> ctypes.CDLL | None:
    """The library, the arguments of its functions declared; None where there are no tiles."""
    found = loaded()
    found.minikv_rows_product.argtypes = [c_int64, c_int64, c_void_p, c_void_p, c_void_p]
    return found if found.minikv_rows_attention_tiles_available() else None


def rows_product(given: matrix.Matrix) -> Callable[[Tensor, Tensor | None], Tensor] | None:
    """A function of x bfloat16 [t, n] and out bfloat16 [>= t, outs] or None. It returns x times the
    transpose of the matrix, bfloat16 [t, outs]: the first rows of `out`, or new memory. It does not
    add the bias. It raises MemoryError.

    None: the matrix is not packed, or C does not take it, or there are no tiles.
    """
    made, library = addresses(given), _library()
    if made is None or made.form == PLAIN or library is None:
        return None
    at = ctypes.addressof(made)

    def run(x: Tensor, out: Tensor | None = None) -> Tensor:
        assert x.dtype is torch.bfloat16
        assert x.is_cpu
        assert x.shape[1] == given.n
        assert made  # so that its memory is kept
        x = x if x.stride(1) == 1 else x.contiguous()
        room = x.new_empty(len(x), given.outs) if out is None else out[: len(x)]
        assert room.shape == (len(x), given.outs)
        assert room.is_contiguous()
        if len(x):
            failed = library.minikv_rows_product(
                len(x), x.stride(0), at, x.data_ptr(), room.data_ptr()
            )
            if failed == _NO_MEMORY:
                raise MemoryError("a product found no memory")
        return room

    return run
