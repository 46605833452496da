"""Boundary pins: the first and the last rows of every turn are kept while there is room.

What was asked and how a document begins lies there, and no scorer knows which question comes next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from minikv.policies.base import Prefer


def prefer(options: Mapping[str, object]) -> Prefer:
    """The `edge` rows at either end of each prompt leave after all others."""
    edge = options["edge"]
    assert isinstance(edge, int)

    def near(pos: Tensor, turns: Sequence[tuple[int, int]]) -> Tensor:
        found = torch.zeros_like(pos, dtype=torch.bool)
        for begin, end in turns:
            inside = (pos >= begin) & (pos < end)
            found |= inside & ((pos < begin + edge) | (pos >= end - edge))
        return found

    return near
