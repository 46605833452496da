"""The norms of values after the output projection: how much a row can add to the output."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_ROWS = 4096  # rows projected at once


def output_norms(value: Tensor, output: Tensor) -> Tensor:
    """float32 [H, N]: the L1 norm |v W|_1 of each value v [H, N, D] after the output projection W
    [H, G, D, hidden], mean over G (CriticalKV, arXiv 2502.03805, algorithm 1)."""
    norms = torch.zeros(value.shape[:2], device=value.device)
    for h in range(len(value)):
        for lo in range(0, value.shape[1], _ROWS):
            rows = value[h, lo : lo + _ROWS].float()
            for one in output[h]:  # [D, hidden]
                norms[h, lo : lo + _ROWS] += (rows @ one.float()).abs().sum(-1)
    return norms / output.shape[1]


def output_lengths(value: Tensor, output: Tensor, most: int = 1 << 16) -> Tensor:
    """float32 [H, G, N]: the length |v W|_2 of each value v [H, N, D] after the output projection W
    [H, G, D, hidden] of each query head. About `most` numbers are computed at once."""
    heads, group = output.shape[:2]
    squares = torch.empty((heads, group, value.shape[1]), device=value.device)
    each = max(value[0].numel(), output[0, 0].numel())
    for some in _blocks(heads, group * each, most):
        rows = value[some, None].float()
        for part in _blocks(group, each * (some.stop - some.start), most):
            weights = output[some, part].float()
            gram = weights @ weights.transpose(2, 3)  # |v W|^2 = v (W W^T) v^T
            squares[some, part] = ((rows @ gram) * rows).sum(-1)
    return squares.clamp(min=0.0).sqrt()


def _blocks(count: int, each: int, most: int) -> Iterator[slice]:
    """Divide `count` things of `each` numbers into slices of at most `most` numbers, but at least
    one thing."""
    step = max(1, most // max(1, each))
    yield from (slice(lo, min(lo + step, count)) for lo in range(0, count, step))
