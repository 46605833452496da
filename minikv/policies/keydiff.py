"""KeyDiff (arXiv 2504.15364): rows whose key is unlike the others stay; no attention is needed.

A row's worth is minus the cosine between its key and the mean of all unit-length keys of its head.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.policies.base import Evidence, PromptView, ends


def scorer(options: Mapping[str, object]) -> Evidence:
    """Distance from the mean direction."""
    sinks, recent = options["sinks"], options["recent"]
    assert isinstance(sinks, int)
    assert isinstance(recent, int)

    def score(view: PromptView) -> Tensor:
        key, scores = view.key(), []
        for h in range(len(key)):
            unit = F.normalize(key[h].float(), dim=-1).masked_fill(~view.live[h, :, None], 0.0)
            anchor = F.normalize(unit.sum(0), dim=0)
            scores.append(-(unit @ anchor))
        return torch.stack(scores)

    return Evidence(score, ends(sinks, recent), sinks=sinks, window=recent, weighs=False)
