"""Keeps the first and the last rows of every turn as long as possible.

They contain the question and the beginning of a document, which a later question may need although
no scorer can know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from minikv.policies.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The first `edge` and the last `edge` rows of each prompt leave after all others, both after a
    prompt and while an answer is written."""

    axis = "prefer"
    name = "turns"
    summary = "the ends of every turn"

    differs: ClassVar[tuple[str, ...]] = ()

    edge: int = option(8, "tokens at either end of a turn", (1, 4096))

    def prefers(self, pos: Tensor, turns: Sequence[tuple[int, int]]) -> Tensor:
        """bool, of the shape of pos int64: which rows these are. turns: see `PromptView`."""
        found = torch.zeros_like(pos, dtype=torch.bool)
        for begin, end in turns:
            inside = (pos >= begin) & (pos < end)
            found |= inside & ((pos < begin + self.edge) | (pos >= end - self.edge))
        return found
