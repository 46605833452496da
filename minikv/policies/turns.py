"""Boundary pins: the first and the last rows of every turn are kept while there is room.

What was asked and how a document begins lies there, and no scorer knows which question comes next.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from minikv.policy import PromptView, Scope


def prefer(options: Mapping[str, object], window: int) -> Scope:
    """Scope: the `edge` rows at either end of each prompt; they go before any other free row."""
    edge = options["edge"]
    assert isinstance(edge, int)

    def scope(view: PromptView) -> Tensor:
        near = torch.zeros_like(view.live)
        for begin, end in view.turns:
            inside = (view.pos >= begin) & (view.pos < end)
            near |= inside & ((view.pos < begin + edge) | (view.pos >= end - edge))
        return near

    return scope
