"""Computes for some heads at a time, so that no temporary is large."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minikv.policies.base import PromptView, StepView
from minikv.policies.selection import in_blocks

AT_ONCE = 1 << 20
"""About how many numbers of keys or values `by_heads` computes with at once."""


def by_query(view: PromptView, make: Callable[[Tensor, slice], Tensor]) -> Tensor:
    """The results of `make` [h, ...] for all heads [H, ...]; it is called with the attention
    [h, G, W, N] of some heads (`PromptView.attention`) and their slice."""
    assert view.attention is not None
    assert view.mass is not None
    seen, each = view.attention, view.mass[0].numel() * view.observed
    return in_blocks(len(view.mass), each, view.ops.block, lambda some: make(seen(some), some))


def by_heads(
    view: StepView,
    read: Callable[[Tensor], Tensor],
    make: Callable[[Tensor, Tensor], Tensor],
    wide: int = 0,
) -> Tensor:
    """float32 [F, N]: the results of `make` for some heads at a time: it is called with the indices
    of the heads int64 [f], and with `read` of these, as float32 [f, N, D]. If values may be read,
    it is not called for heads that cannot evict; these have 0. wide: how many numbers `make`
    computes with for each row, if they are more than D."""
    found = torch.zeros(view.pos.shape, device=view.pos.device)
    heads = torch.arange(len(found), device=found.device)
    if view.readable:
        heads = (view.pos >= 0).any(1).nonzero()[:, 0]
    each = found.shape[1] * max(wide, read(heads[:0]).shape[-1])
    for part in torch.split(heads, max(1, AT_ONCE // each)):
        found[part] = make(part, read(part).float())
    return found
