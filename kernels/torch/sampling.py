"""From logits to the next token without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor


def greedy(logits: Tensor, token: Tensor, found: Tensor, finite: Tensor) -> None:
    """The token of the largest logit, of equal ones the first.

    logits float32 [V]. In place: token int64 [1]; finite bool []: whether all logits are finite (if
    not, the token is any of the V); found int64 [2]: both of them.
    """
    best, good = logits.argmax(), torch.isfinite(logits).all()
    token.copy_(best)
    finite.copy_(good)
    found.copy_(torch.stack((best, good)))
