"""Norms of values after the output projection W_O: how much a row can add to the output."""

from __future__ import annotations

import torch
from torch import Tensor

from minikv.policies.base import PromptView, RepeatView, blocks


def output_lengths(view: PromptView | RepeatView) -> Tensor:
    """float32 [H, G, N]: |v W_O|_2 of every value, with the projection of each query head."""
    value, output = view.value(), _projection(view)
    heads, group = output.shape[:2]
    squares = torch.empty((heads, group, value.shape[1]), device=value.device)
    each = max(value[0].numel(), output[0, 0].numel())
    for some in blocks(heads, group * each, view.ops.block):
        rows = value[some, None].float()
        for part in blocks(group, each * (some.stop - some.start), view.ops.block):
            weights = output[some, part].float()
            gram = weights @ weights.transpose(2, 3)  # |v W|^2 = v (W W^T) v^T
            squares[some, part] = ((rows @ gram) * rows).sum(-1)
    return squares.clamp(min=0.0).sqrt()


def output_norms(view: PromptView) -> Tensor:
    """float32 [H, N]: |v W_O|_1 of every value, mean over the group's query heads."""
    return view.ops.output_norms(view.value(), _projection(view))


def _projection(view: PromptView | RepeatView) -> Tensor:
    """The layer's output projection [H, G, D, hidden]."""
    assert view.output is not None, "the network's output projection is not known"
    return view.output()
