"""The small operators of a transformer layer, between its matrix products."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add y to x in place, then RMSNorm: x, y and the result [t, n], weight [n].

    The norm is in float32 and is cast back before the weight is applied (arXiv 1910.07467).
    """
    if y is not None:
        x.add_(y)
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    if len(x) == 1 and x.is_cpu:  # in a decode step: five small operators instead of ten
        row = x[0].float()
        mean = torch.dot(row, row).item() / row.numel()
        return torch.mul(x, 1 / math.sqrt(mean + eps)).mul_(weight)
    return F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings to x [t, heads, D], half-split (arXiv 2104.09864).

    cos and sin [t, 1, D]; the sine of the first half is negated. Returns a new contiguous tensor.
    """
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half])
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


def rotary_table(
    position: Tensor, inverse: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of one position for `rotate`, [1, 1, D] each.

    position int64 []; inverse float32 [D / 2]: the angle per position, in radians. Cosine and sine
    are multiplied by `scale`. All is computed in float32 and then cast to `dtype`.
    """
    angle = position.to(torch.float32) * inverse
    cos, sin = angle.cos() * scale, angle.sin() * scale
    cos, sin = torch.cat((cos, cos)), torch.cat((-sin, sin))
    return cos.to(dtype)[None, None], sin.to(dtype)[None, None]


def silu_mul(both: Tensor) -> Tensor:
    """silu(gate) * up; `both` [t, 2 * n] is the gate, then up. Writes the result over the gate and
    returns it: a view [t, n]."""
    size = both.shape[1] // 2
    gate = both[:, :size]
    return F.silu(gate, inplace=True).mul_(both[:, size:])
