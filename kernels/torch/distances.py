"""How unlike a key is to the others of its head (KeyDiff, arXiv 2504.15364)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def key_distances(key: Tensor, pos: Tensor) -> Tensor:
    """float32 [H, N]: minus the cosine between each key and the mean of its head's unit keys.

    key [H, N, D]; pos int64 [H, N], -1 for no row. Such rows do not count, whatever their key, and
    get 0.
    """
    return torch.stack([distances(units(*head)) for head in zip(key, pos, strict=True)])


def units(key: Tensor, pos: Tensor) -> Tensor:
    """float32 [N, D]: the keys of a head with length 1, and 0 where pos int64 [N] is -1."""
    return F.normalize(key.float(), dim=-1).masked_fill(pos[:, None] < 0, 0.0)


def distances(unit: Tensor) -> Tensor:
    """float32 [N]: minus the cosine between rows of length 1 (or 0) [N, D] and their mean."""
    return -(unit @ F.normalize(unit.sum(0), dim=0))
