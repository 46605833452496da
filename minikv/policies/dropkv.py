"""DropKV (openreview MqfNzH3TVH, and kvpress #285): how much the output changes if one row leaves.

If a query gives row j the attention p, then without that row its output o changes by p / (1 - p) x
(o - v_j), because the softmax is renormalised. A row's worth is the squared norm of this change,
summed over the window's queries.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minikv.policies import options
from minikv.policies.base import Evidence, PromptView, Scorer
from minikv.policies.options import Method, option
from minikv.policies.selection import blocks, joined, pool
from minikv.policies.some_heads import by_query


@dataclass(frozen=True, slots=True, kw_only=True)
class DropKV(Scorer):
    """The squared change, joined over the group (`group`) and pooled; the window's own rows all
    stay."""

    name = "dropkv"
    summary = "change of the output, squared"

    window: int = options.window()
    kernel: int = options.kernel()
    pooling: str = options.pooling("avg")
    group: str = options.group()
    epsilon: float = option(1e-6, "added to 1 - p, which may be 0", (1e-12, 1.0))
    sinks: int = options.sinks(0)

    @property
    def evidence(self) -> Evidence:
        return Evidence(
            observe=self.window,
            asks=True,
            sinks=self.sinks,
            window=self.window,
            each_query=True,
            copies="v",
            vectors=1,
            products=2,
        )

    def score(self, view: PromptView) -> Tensor:
        value, gone, most = view.value(), ~view.live[..., None], view.ops.block

        def changes(p: Tensor, some: slice) -> Tensor:
            rows = value[some].float().masked_fill(gone[some], 0.0)
            return output_changes(p, rows, self.epsilon, most)

        change = joined(by_query(view, changes), self.group)
        return pool(change, view.order, self.free(view), self.kernel, self.pooling)

    differs = (
        "kvpress also pools over the window's own tokens; here they count as 0",
        "kvpress rounds probabilities to the model's number format; here they are float32",
    )


def output_changes(p: Tensor, value: Tensor, epsilon: float, numbers: int) -> Tensor:
    """float32 [h, G, N]: the sum over queries of (p / (1 - p + epsilon))^2 |v - o|^2.

    p [h, G, W, N]: the attention of some heads. value float32 [h, N, D]. numbers: about how many
    numbers are computed at once.

    If a query gives one row nearly all of its attention, 1 - p and v - o are small differences of
    large numbers, with large rounding errors. So for each query's largest p, both are computed from
    the attention to the other rows.
    """
    heads, group, _, rows = p.shape
    found = p.new_empty((heads, group, rows))
    squares = (value * value).sum(-1)[:, None]
    each = value[0].numel()
    for some in blocks(heads, group * each, numbers):
        mine = value[some, None]
        for part in blocks(group, each * (some.stop - some.start), numbers):
            given = p[some, part]  # [h, g, W, N]
            top, at = given.max(-1, keepdim=True)  # [h, g, W, 1]
            others = given.scatter(-1, at, 0.0)
            left = others.sum(-1, keepdim=True)
            moved = others @ mine  # [h, g, W, D]
            own = mine.expand(*given.shape[:2], -1, -1).gather(2, at.expand_as(moved))
            output = moved + top * own
            most = (moved - left * own).square().sum(-1, keepdim=True)
            most = most * (top / (left + epsilon)).square()
            weight = (others / (1.0 - others + epsilon)).square_()
            across = weight.transpose(2, 3)
            crossed = ((across @ output) * mine).sum(-1)
            lengths = (across @ (output * output).sum(-1, keepdim=True))[..., 0]
            change = weight.sum(2) * squares[some] - 2.0 * crossed + lengths
            found[some, part] = change.clamp_(min=0.0)
            found[some, part] += weight.zero_().scatter_(-1, at, most).sum(2)
    return found


METHOD = Method(
    "dropkv",
    "tokens without which the output of the last window's queries would change most (openreview "
    "MqfNzH3TVH, kvpress' pull request 285); made for dropkv+global",
    parts=(DropKV,),
    good="a question, short answer",
    paper="MqfNzH3TVH",
)
