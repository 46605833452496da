"""Norms of values after the output projection W_O: how much a row can add to the output."""

from __future__ import annotations

import torch
from torch import Tensor

from minikv.policies.base import PromptView
from minikv.policies.repeats import RepeatView
from minikv.policies.selection import blocks, in_blocks

WEIGHTS = 1 << 20
"""How many numbers of W_O are made float32 at once, or those of one head, if they are more."""
_PROJECTED = 4096  # rows projected at once, those of all heads counted


def output_lengths(view: PromptView | RepeatView, *, together: bool = False) -> Tensor:
    """float32 [H, G, N]: |v W_O|_2 of every value, with the projection of each query head.
    together: [H, 1, N], the root of the mean of their squares over the group."""
    value, output = view.value(), _projection(view)

    def gram(some: slice) -> Tensor:
        weights = output[some].float()
        found = weights @ weights.transpose(2, 3)
        return found.mean(1, keepdim=True) if together else found

    # |v W|^2 = v (W W^T) v^T
    grams = in_blocks(len(output), output[0].numel(), WEIGHTS, gram)
    return view.ops.quadratic_forms(value, grams, view.ops.block).clamp_(min=0.0).sqrt_()


def output_norms(view: PromptView) -> Tensor:
    """float32 [H, N]: |v W_O|_1 of every value, mean over the group's query heads (CriticalKV,
    arXiv 2502.03805, algorithm 1)."""
    value, output = view.value(), _projection(view)
    heads, group = output.shape[:2]
    norms = torch.zeros(value.shape[:2], device=value.device)
    for some in blocks(heads, output[0].numel(), view.ops.block):
        weights = output[some].float().unbind(1)  # [h, D, hidden] each
        step = max(1, _PROJECTED // (some.stop - some.start))
        for lo in range(0, value.shape[1], step):
            rows = value[some, lo : lo + step].float()
            for one in weights:
                norms[some, lo : lo + step] += (rows @ one).abs_().sum(-1)
    return norms / group


def _projection(view: PromptView | RepeatView) -> Tensor:
    """The layer's output projection [H, G, D, hidden]."""
    assert view.output is not None, "the network's output projection is not known"
    return view.output()
