"""Hash codes of keys and queries (SimHash, as in HashEvict, arXiv 2412.16187, section 3)."""

from __future__ import annotations

import torch
from torch import Tensor


def codes(x: Tensor, matrix: Tensor) -> Tensor:
    """int64 [...]: the signs of x [..., D] @ matrix [D, bits] as one number; zero is positive."""
    signs = (x.to(torch.float32) @ matrix >= 0).to(torch.int64)
    return (signs << torch.arange(matrix.shape[1], device=x.device)).sum(-1)


def hash_codes(key: Tensor, matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """The `codes` of keys [H, N, D] as integers [H, N] of `dtype`."""
    return codes(key, matrix).to(dtype)
