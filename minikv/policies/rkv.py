"""R-KV (arXiv 2505.24133, section 3): rows stay if they get attention and their key is unlike
others.

For models that write long answers and repeat themselves. A head adds `buffer` new rows, then evicts
as many at once. A row's worth is `mix` times its attention minus (1 - `mix`) times its redundancy.
Its attention is the mean over the last `window` queries, then the largest among `kernel`
neighbouring rows. Its redundancy is a softmax over the head's rows of the mean cosine between its
key and the other keys. Of all rows whose cosine to a given row is above `threshold`, that cosine
does not count for the newest. The window's rows always stay.

`softmax=past` and `group=max` are as in the release, `rkv/compression/r1_kv.py`. If no cosine to a
row is above the threshold, all of them count.

Keys are compared in blocks, so that no temporary has more than `AT_ONCE` numbers (or one head's
keys, if these are more), however many rows a head holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.errors import UsageError
from minikv.policies import options, some_heads
from minikv.policies.base import Columns, StepPolicy, StepView, Visible
from minikv.policies.options import Method, option
from minikv.policies.selection import order_of, pool
from minikv.policies.some_heads import by_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class RKV(StepPolicy):
    """The columns `seen0`, `seen1`, ... hold the attention of each of the last `window` queries to
    a row, the newest query first."""

    sinks: int = options.sinks(0)
    window: int = option(8, "last queries that score; their tokens always stay", (1, 256))
    buffer: int = option(
        128,
        "how many tokens a head adds before it evicts as many; at least the window",
        (1, 4096),
    )
    kernel: int = options.kernel()
    mix: float = option(0.07, "weight of attention; 1 - mix is that of redundancy", (0.0, 1.0))
    threshold: float = option(
        0.5,
        "keys with a larger cosine are similar; the newest of them is not redundant",
        (-1.0, 1.0),
    )
    softmax: str = option(
        "all",
        "softmax of attention: all: over all tokens; past: over those before the window (the "
        "release)",
        ("all", "past"),
    )
    group: str = option(
        "mean",
        "how the query heads of a KV head are joined; max: the maximum before the softmax (the "
        "release)",
        ("mean", "sum", "max"),
    )
    name: str = "rkv"

    def __post_init__(self) -> None:
        if self.buffer < self.window:
            raise UsageError(
                f"rkv: a buffer of {self.buffer} is smaller than the window of {self.window}",
                "the window's queries must all be newer than the last eviction; give more `buffer`",
            )

    @property
    def recent(self) -> int:  # type: ignore[override]
        return self.window

    @property
    def block(self) -> int:  # type: ignore[override]
        return self.buffer

    @property
    def columns(self) -> dict[str, torch.dtype]:
        return {f"seen{i}": torch.float32 for i in range(self.window)}

    def attention(self, logits: Tensor, lse: Tensor, live: Tensor) -> Tensor:
        if self.group != "max":
            mean = StepPolicy.attention(self, logits, lse, live)
            return mean * logits.shape[-2] if self.group == "sum" else mean
        best = logits.amax(-2).masked_fill(~live, -torch.inf)
        return best.softmax(-1).masked_fill(~live, 0.0)  # a head without rows has NaN

    def update(self, columns: Columns, attention: Tensor, visible: Visible) -> None:
        for i in range(self.window - 1, 0, -1):
            columns[f"seen{i}"].copy_(columns[f"seen{i - 1}"])
        columns["seen0"].copy_(attention)

    def score(self, view: StepView) -> Tensor:
        past = (view.pos >= 0) & (view.pos < view.position - self.window)
        attention = torch.zeros_like(view.pos, dtype=torch.float32)
        for name in self.columns:
            of_past = view.column(name).masked_fill(~past, 0.0)
            if self.softmax == "past":
                of_past = of_past / of_past.sum(1, keepdim=True).clamp(min=1e-30)
            attention += of_past
        order = order_of(view.pos)
        attention = pool(attention / self.window, order, past, self.kernel, "max")
        attention = attention.masked_fill(~past, 0.0)
        score = self.mix * attention - (1 - self.mix) * redundancy(view, self.threshold)
        # If an adaptive budget gives a head less than the window, the window's rows leave last.
        old = past & (view.pos >= self.sinks)
        last = ~old & old.any(1, keepdim=True)
        return score.masked_fill(last, torch.finfo(torch.float32).max)

    differs = (
        "attention counts the window's tokens in its softmax; the release leaves them out "
        "(softmax=past)",
        "the query heads of a KV head are joined by the mean of their attention; in the release by "
        "the max before the softmax (group=max)",
        "neighbours and the newest of similar keys are meant by position; in the release by slot, "
        "and its slots are shuffled by its own choice",
        "a key that is like no other spares no token; in the release it spares the first token",
        "prompts are left to the prompt policy, or to --stride; the release also applies its rule "
        "to a prompt over the budget",
        "pinned tokens are not compared",
    )


def redundancy(view: StepView, threshold: float) -> Tensor:
    """float32 [F, N]: how similar each row's key is to the head's other keys; the values of a
    head's rows sum to 1.

    0 where `view.pos` is -1.
    """
    assert view.keys is not None

    def means(some: Tensor, key: Tensor) -> Tensor:
        pos = view.pos[some].to(torch.int32)
        exists = pos >= 0
        unit = F.normalize(key, dim=-1).masked_fill(~exists[..., None], 0.0)  # there may be NaN
        mean = sums(unit, pos, threshold) / exists.sum(1, keepdim=True).clamp(min=1)
        return mean.masked_fill(~exists, -torch.inf).softmax(1).masked_fill(~exists, 0.0)

    return by_heads(view, view.keys, means, wide=view.pos.shape[1])


def sums(unit: Tensor, pos: Tensor, threshold: float) -> Tensor:
    """float32 [f, N]: for each row j the sum of its cosines to the other rows i. The cosine to i
    does not count if j is the newest of all rows whose cosine to i is above `threshold`.

    unit float32 [f, N, D]: keys of length 1, or 0 where there is no row. pos int32 [f, N].
    """
    heads, wide = pos.shape
    total = torch.zeros((heads, wide), device=unit.device)
    rows = max(1, some_heads.AT_ONCE // max(1, heads * wide))
    for lo in range(0, wide, rows):
        cosine = unit[:, lo : lo + rows] @ unit.transpose(1, 2)  # [f, rows, N]
        cosine.diagonal(lo, 1, 2).zero_()
        alike = torch.where(cosine > threshold, pos[:, None], -1)
        newest, at = alike.max(-1, keepdim=True)
        cosine.scatter_(-1, at, cosine.gather(-1, at).masked_fill_(newest >= 0, 0.0))
        total += cosine.sum(1)
    return total


METHOD = Method(
    "rkv",
    "tokens that get attention and whose key is unlike the others stay; a head grows by `buffer` "
    "tokens over its budget, then evicts as many at once",
    rule=RKV,
    good="long answers",
    paper="2505.24133",
    told="attention - redundancy",
    state="a number per query of the window",
    again="fades",
)
