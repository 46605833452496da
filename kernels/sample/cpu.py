"""Draws a token from logits, in C (`sampling.c`). `plain.py` handles other dtypes."""

from __future__ import annotations

import torch
from torch import Tensor

from minikv.kernels.native.binding import function, plain
from minikv.kernels.sample import plain as plain_torch

_drawn = function("drawn", "npdnddddp", "a draw")


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
    _drawn(vocab, logits, temperature, top_k, top_p, min_p, float(point), scale, token)
    return token
