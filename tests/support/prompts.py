"""Attention of a prompt's queries in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def weights(
    q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor, window: int | None
) -> tuple[Tensor, Tensor]:
    """float64 probabilities [H, G, T, N] and log-sum-exps [H, G, T] of q [H, G, T, D]."""
    logits = torch.einsum("hgtd,hnd->hgtn", q.double(), k.double().nan_to_num(0.0))
    distance = q_pos[None, :, None] - k_pos[:, None]
    seen = (distance >= 0) & (k_pos >= 0)[:, None]
    if window is not None:
        seen &= distance < window
    logits = (logits / math.sqrt(q.shape[-1])).masked_fill(~seen[:, None], -math.inf)
    return logits.softmax(-1).nan_to_num(0.0), logits.logsumexp(-1)
