"""Keys and values in one byte per number: int8 codes, and a float32 scale per row."""

from __future__ import annotations

import torch
from torch import Tensor


def to_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows x [..., D]: codes int8 [..., D] and scale float32 [...], x ~ codes * scale.

    Symmetric: the largest magnitude of a row becomes 127. A row of zeros has scale 1.
    """
    most = x.abs().amax(-1).to(torch.float32)
    scale = torch.where(most == 0, 1.0, most / 127.0)  # NaN stays NaN
    codes = (x / scale[..., None]).round_().clamp_(-127, 127)
    return codes.to(torch.int8), scale


def from_codes(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `to_codes`: numbers [..., D] of `dtype`."""
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    return torch.mul(codes, scale[..., None], out=out)  # without a copy in float32
