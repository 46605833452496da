"""A layer after attention, in torch, as separate calls make it: twin of
kernels/layer/tail_gpu.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.kernels.layer import plain as layer
from minikv.kernels.product.matrix import Matrix
from minikv.models.linear import unpack_int4_rows


def dense(matrix: Matrix) -> Tensor:
    """The weights [outs, n], float32; of four bits, rounded to bfloat16."""
    weights, scales = matrix.weights, matrix.scales
    if scales is None:
        return weights.float()
    if weights.dtype == torch.int8:
        return weights.float() * scales.float()[:, None]
    made = torch.empty((matrix.outs, matrix.n), device=weights.device)
    unpack_int4_rows(weights, scales, made)
    return made


def layer_tail(
    out: Matrix,
    gate_up: Matrix,
    down: Matrix,
    following: Matrix | None,
    mlp_norm: Tensor,
    next_norm: Tensor,
    eps: float,
) -> Callable[[Tensor, Tensor], Tensor]:
    """As `layer_tail` of kernels/layer/tail_gpu.py, which may be None for what this takes."""

    def run(x: Tensor, mixed: Tensor) -> Tensor:
        normed = layer.add_norm(x, _times(out, mixed), mlp_norm, eps)
        gated = layer.silu_mul(_times(gate_up, normed))
        normed = layer.add_norm(x, _times(down, gated), next_norm, eps)
        return normed if following is None else _times(following, normed)

    return run


def normed_product(matrix: Matrix, norm: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
    """As the function of that name in kernels/layer/tail_gpu.py."""
    return lambda x: _times(matrix, layer.add_norm(x, None, norm, eps))


def packed_row(matrix: Matrix, kind: torch.dtype) -> Callable[[Tensor], Tensor]:
    """As the function of that name in kernels/layer/tail_gpu.py."""
    return lambda x: _times(matrix, x)


def _times(matrix: Matrix, x: Tensor) -> Tensor:
    bias = None if matrix.bias is None else matrix.bias.float()
    return F.linear(x.float(), dense(matrix), bias).to(x.dtype)
