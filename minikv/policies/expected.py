"""Expected Attention (arXiv 2510.00636, section 3): what queries yet to come will look at.

The prompt's queries, before rotation, are taken for normal with their mean and covariance; their
rotation is averaged over the next positions. A row's worth is the attention that such a query gives
it on average, in closed form, times the length of its value.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from minikv.policies.base import Evidence, PromptView, ends


def scorer(options: Mapping[str, object]) -> Evidence:
    """The mean over the group of the expected attention."""
    sinks, recent, future = options["sinks"], options["recent"], options["future"]
    covariance, norm = bool(options["covariance"]), bool(options["value_norm"])
    epsilon = options["epsilon"]
    assert isinstance(epsilon, float)
    assert isinstance(sinks, int)
    assert isinstance(recent, int)
    assert isinstance(future, int)

    def score(view: PromptView) -> Tensor:
        assert view.queries is not None
        assert view.rotary is not None, "the network's rotary frequencies are not known"
        mean, spread = view.queries.normal()  # [H, G, D], [H, G, D, D]
        turn = average_rotation(view.rotary, view.position, future)
        mean = mean @ turn.T
        spread = turn @ spread @ turn.T
        size = mean.shape[-1]
        free = view.live & (view.pos >= sinks)
        value = view.value() if norm else None
        scores = []
        for h, key in enumerate(view.key()):
            rows = key.float()
            logits = mean[h] @ rows.T * size**-0.5  # [G, N]
            if covariance:
                logits += ((rows @ spread[h]) * rows).sum(-1) / (2 * size)
            worth = logits.masked_fill(~free[h], -torch.inf).softmax(-1).mean(0)
            if value is not None:
                length = torch.linalg.vector_norm(value[h].float(), dim=-1)
                worth = (worth + epsilon) * length
            scores.append(worth)
        return torch.stack(scores)

    return Evidence(score, ends(sinks, recent), sinks=sinks, window=recent, queries_from=sinks)


def average_rotation(rotary: Tensor, position: int, future: int) -> Tensor:
    """float32 [D, D]: the mean rotation over the next `future` positions; rotary [D / 2]."""
    at = torch.arange(position, position + future, device=rotary.device, dtype=torch.float64)
    angle = at[:, None] * rotary.to(torch.float64)
    cos, sin = angle.cos().mean(0), angle.sin().mean(0)
    top = torch.cat((cos.diag(), -sin.diag()), 1)
    return torch.cat((top, torch.cat((sin.diag(), cos.diag()), 1))).to(torch.float32)
