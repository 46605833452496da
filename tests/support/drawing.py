"""Random tensors, and comparing in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def randoms(seed: int, *shape: int, dtype: torch.dtype = torch.float32, by: float = 1.0) -> Tensor:
    """Normal numbers times `by`."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (made * by).to(dtype)


def close(got: Tensor, want: Tensor, loose: float = 1e-5) -> None:
    """Fail if the tensors differ by more than `loose`, relative and absolute."""
    torch.testing.assert_close(got.double(), want.double(), rtol=loose, atol=loose)
