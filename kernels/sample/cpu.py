"""Draw a token from logits, in C (`sampling.c`). `plain.py` takes other dtypes."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from minikv.kernels.native.binding import loaded, plain
from minikv.kernels.sample import plain as plain_torch


@cache
def _library() -> ctypes.CDLL:
    """The library, the arguments of its function declared."""
    found = loaded()
    d, n, p = c_double, c_int64, c_void_p
    found.minikv_drawn.argtypes = [n, p, d, n, d, d, d, d, p]
    found.minikv_drawn.restype = c_int
    return found


def drawn(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, point: Tensor
) -> Tensor:
    """See `plain.drawn`. The exponential may differ from torch's in the last places. So if
    the point is within 2^-40 of the boundary of two tokens, it may pick the other one. Raises
    MemoryError."""
    if not plain(torch.float32, logits):
        return plain_torch.drawn(logits, temperature, top_k, top_p, min_p, point)
    vocab = len(logits)
    token = torch.empty((), dtype=torch.int64)
    scale = plain_torch.scale(vocab)
    if _library().minikv_drawn(
        vocab,
        logits.data_ptr(),
        temperature,
        top_k,
        top_p,
        min_p,
        float(point),
        scale,
        token.data_ptr(),
    ):
        raise MemoryError("a draw found no memory")
    return token
