"""KeyDiff (arXiv 2504.15364): rows whose key is unlike the others stay; no attention is needed.

A row's worth is minus the cosine between its key and the mean of all unit-length keys of its head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.policies.base import Evidence, PromptView, Scorer


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDiff(Scorer):
    """Distance from the mean direction."""

    sinks: int
    recent: int

    @property
    def evidence(self) -> Evidence:
        return Evidence(sinks=self.sinks, window=self.recent, adds_up=False)

    def score(self, view: PromptView) -> Tensor:
        key, scores = view.key(), []
        for h in range(len(key)):
            unit = F.normalize(key[h].float(), dim=-1).masked_fill(~view.live[h, :, None], 0.0)
            anchor = F.normalize(unit.sum(0), dim=0)
            scores.append(-(unit @ anchor))
        return torch.stack(scores)
