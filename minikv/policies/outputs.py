"""The length of values behind the output projection W_O: what a row can write to the output."""

from __future__ import annotations

import torch
from torch import Tensor

from minikv.policies.base import PromptView, RepeatView

_ROWS = 4096  # rows projected at once


def output_lengths(view: PromptView | RepeatView) -> Tensor:
    """float32 [H, G, N]: |v W_O|_2 of every value, in the output of each query head."""
    squares = []
    for rows, group in zip(view.value(), _projection(view), strict=True):
        rows = rows.float()
        grams = [one @ one.T for one in group.float()]  # |v W|^2 = v (W W^T) v^T
        squares.append(torch.stack([((rows @ gram) * rows).sum(-1) for gram in grams]))
    return torch.stack(squares).clamp(min=0.0).sqrt()


def output_norms(view: PromptView | RepeatView) -> Tensor:
    """float32 [H, N]: |v W_O|_1 of every value, mean over the group's query heads."""
    value, output = view.value(), _projection(view)
    norms = torch.zeros(value.shape[:2], device=value.device)
    for h in range(len(value)):
        for lo in range(0, value.shape[1], _ROWS):
            rows = value[h, lo : lo + _ROWS].float()
            for one in output[h]:  # [D, hidden]
                norms[h, lo : lo + _ROWS] += (rows @ one.float()).abs().sum(-1)
    return norms / output.shape[1]


def _projection(view: PromptView | RepeatView) -> Tensor:
    """[H, G, D, hidden]."""
    assert view.output is not None, "the network's output projection is not known"
    return view.output()
