"""Keeps the first and the last rows of every turn as long as possible.

They contain the question and the beginning of a document, which a later question may need although
no scorer can know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.policies.options import option
from minikv.policies.parts import Preference


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns(Preference):
    """The first `edge` and the last `edge` rows of each prompt leave after all others."""

    name = "turns"
    summary = "the ends of every turn"

    edge: int = option(8, "tokens at either end of a turn", (1, 4096))

    def prefers(self, pos: Tensor, turns: Sequence[tuple[int, int]]) -> Tensor:
        found = torch.zeros_like(pos, dtype=torch.bool)
        for begin, end in turns:
            inside = (pos >= begin) & (pos < end)
            found |= inside & ((pos < begin + self.edge) | (pos >= end - self.edge))
        return found
