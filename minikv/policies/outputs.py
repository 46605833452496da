"""Norms of values after the output projection W_O: how much a row can add to the output."""

from __future__ import annotations

from torch import Tensor

from minikv.policies.base import PromptView, RepeatView


def output_lengths(view: PromptView | RepeatView) -> Tensor:
    """float32 [H, G, N]: |v W_O|_2 of every value, with the projection of each query head."""
    return view.ops.output_lengths(view.value(), _projection(view), view.ops.block)


def output_norms(view: PromptView) -> Tensor:
    """float32 [H, N]: |v W_O|_1 of every value, mean over the group's query heads."""
    return view.ops.output_norms(view.value(), _projection(view))


def _projection(view: PromptView | RepeatView) -> Tensor:
    """The layer's output projection [H, G, D, hidden]."""
    assert view.output is not None, "the network's output projection is not known"
    return view.output()
