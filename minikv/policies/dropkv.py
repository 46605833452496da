"""DropKV (openreview MqfNzH3TVH, and kvpress #285): what the output loses when a row leaves alone.

Without row j the softmax of a query that gave it p is shared out anew, and its output o moves by
p / (1 - p) x (o - v_j). A row's worth is the square of that, summed over the window's queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.policies.base import Evidence, PromptView, Scorer
from minikv.policies.snapkv import join_group


@dataclass(frozen=True, slots=True, kw_only=True)
class DropKV(Scorer):
    """Pooled mean over the group of the squared change; the window's own rows all stay."""

    window: int
    kernel: int
    pooling: str
    group: str
    epsilon: float
    sinks: int

    @property
    def evidence(self) -> Evidence:
        return Evidence(
            observe=self.window,
            asks=True,
            sinks=self.sinks,
            window=self.window,
            each_query=True,
        )

    def score(self, view: PromptView) -> Tensor:
        assert view.attention is not None
        changes = []
        for h, value in enumerate(view.value()):
            rows = value.float().masked_fill(~view.live[h, :, None], 0.0)
            changes.append(output_changes(view.attention(h), rows, self.epsilon))
        scores = join_group(torch.stack(changes), self.group)
        free = self.free(view)
        return view.ops.pool(scores, view.pos, free, self.kernel, self.pooling)


def output_changes(p: Tensor, value: Tensor, epsilon: float) -> Tensor:
    """float32 [G, N]: the sum over queries of (p / (1 - p + epsilon))^2 |v - o|^2.

    p [G, W, N]: the attention of one head; value [N, D] float32.
    """
    found = []
    squares = (value * value).sum(-1)
    for given in p:  # [W, N]
        output = given @ value  # [W, D]
        weight = (given / (1.0 - given + epsilon)).square_()
        crossed = ((weight.T @ output) * value).sum(-1)
        lengths = weight.T @ (output * output).sum(-1)
        found.append((weight.sum(0) * squares - 2.0 * crossed + lengths).clamp(min=0.0))
    return torch.stack(found)
