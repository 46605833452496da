"""Expected Attention (arXiv 2510.00636, section 3): the attention that future queries will give.

Future queries, before rotation, are assumed to be normally distributed with the mean and covariance
of the prompt's queries. Their rotation is averaged over the next `future` positions. A row's worth
is the expected attention of such a query, in closed form, times the norm of its value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.policies import adakv, options
from minikv.policies.base import Evidence, PromptView, Scorer
from minikv.policies.options import Method, option
from minikv.policies.selection import blocks, in_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedAttention(Scorer):
    """The expected attention, mean over the group."""

    name = "expected"
    summary = "expected attention"

    sinks: int = options.sinks()
    recent: int = options.recent()
    future: int = option(512, "positions over which the rotation is averaged", (1, 1 << 20))
    covariance: bool = option(True, "use the covariance of the queries, not only their mean")
    value_norm: bool = option(True, "multiply by the norm of the value")
    epsilon: float = option(
        0.0,
        "added to the attention before it is multiplied by the norm of the value; kvpress' "
        "published scores use 0.01",
        (0.0, 1.0),
    )

    @property
    def evidence(self) -> Evidence:
        return Evidence(
            sinks=self.sinks, window=self.recent, queries_from=self.sinks, copies="kv", products=2
        )

    def score(self, view: PromptView) -> Tensor:
        assert view.queries is not None
        rotation = view.rotary
        assert rotation is not None, "the network's rotary frequencies are not known"
        rotary = rotation.layers[view.layer]

        def turn() -> Tensor:
            end = view.position + self.future
            at = torch.arange(view.position, end, device=view.pos.device, dtype=torch.float64)
            return average_rotation(rotary.inverse, at, rotation.query_scale(at, self.future))

        # The same for all layers with the same rotation.
        turned = view.once((self, id(rotary)), turn, shared=True)
        mean, covariance = view.queries.normal(turned)  # [H, G, D], [H, G, D, D]
        key, value = view.key(), view.value() if self.value_norm else None
        (heads, rows, size), group, most = key.shape, mean.shape[1], view.ops.block

        def of(some: slice) -> Tensor:
            line = key[some].float()
            logits = mean[some] @ line.transpose(1, 2) * size**-0.5  # [h, G, N]
            if self.covariance:
                line = line[:, None]
                for part in blocks(group, line.numel(), most):
                    spread = (line @ covariance[some, part]).mul_(line)
                    logits[:, part] += spread.sum(-1) / (2 * size)
            hidden = view.pos[some, None] < self.sinks
            worth: Tensor = logits.masked_fill(hidden, -torch.inf).softmax(-1).mean(1)
            if value is not None:
                length = torch.linalg.vector_norm(value[some], dim=-1, dtype=torch.float32)
                worth = (worth + self.epsilon) * length
            return worth

        return in_blocks(heads, group * rows * size, most, of)

    differs = (
        "the newest 10 tokens stay too; kvpress protects only the first 4 (`recent`)",
        "epsilon=0, as the formula has it; published comparisons with kvpress use 0.01 and "
        "Ada-KV's budgets, which is ada-expected",
    )


def average_rotation(inverse: Tensor, at: Tensor, scale: float | Tensor | None) -> Tensor:
    """float32 [D, D]: the matrix of rotation and scale, mean over the positions at float64 [T].
    inverse [D / 2]: the angles per position; scale: see `Rotation.query_scale`."""
    angle = at[:, None] * inverse.to(torch.float64)
    cos, sin = angle.cos(), angle.sin()
    if scale is not None:
        cos, sin = cos * scale, sin * scale
    cos, sin = cos.mean(0), sin.mean(0)
    top = torch.cat((cos.diag(), -sin.diag()), 1)
    return torch.cat((top, torch.cat((sin.diag(), cos.diag()), 1))).to(torch.float32)


EXPECTED = Method(
    "expected",
    "tokens that future queries are expected to attend to, whatever is asked",
    parts=(ExpectedAttention,),
    good="continuing a text",
    paper="2510.00636",
)


ADA_EXPECTED = Method(
    "ada-expected",
    "expected attention with the settings of the published scores: epsilon 0.01, and kvpress' head "
    "budgets",
    parts=(ExpectedAttention, adakv.AdaKV),
    good="continuing a text",
    paper="2510.00636",
    preset={"epsilon": 0.01, "alloc": "floor", "recent": 0},
)
