"""VaSE (arXiv 2606.03928; release terarachang/VaSE, `range_sink_sample_attn`): rows with large
values stay, and a random draw of the others.

For models that write long answers: without the few rows whose values are far larger than others, a
model starts to repeat itself; and a draw keeps more diverse rows than the best scores do. A head
adds `buffer` new rows, then evicts as many at once. The newest `window` rows stay, and so do the
rows whose values have the widest range (largest minus smallest number), a share `large` of the cap.
The others are drawn without replacement in proportion to their attention from the latest queries,
averaged over `kernel` neighbouring rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.policies import options, selection
from minikv.policies.base import Columns, PromptView, StepPolicy, StepView, Visible
from minikv.policies.counter_rng import gumbel
from minikv.policies.options import Method, option
from minikv.policies.some_heads import by_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class VaSE(StepPolicy):
    """The column `fading` is a decaying sum of a row's attention: with each token, earlier
    attention is multiplied by 1 - 1 / window."""

    sinks: int = options.sinks()
    window: int = option(
        32, "newest tokens, always kept; about as many last queries score", (1, 4096)
    )
    buffer: int = option(64, "how many tokens a head adds before it evicts as many", (1, 4096))
    large: float = option(
        0.25, "share of the budget for the tokens whose values have the widest range", (0.0, 0.9)
    )
    kernel: int = options.kernel(5)
    seed: int = options.seed()
    name: str = "vase"

    @property
    def observe(self) -> int:  # type: ignore[override]
        return self.window

    @property
    def recent(self) -> int:  # type: ignore[override]
        return self.window

    @property
    def block(self) -> int:  # type: ignore[override]
        return self.buffer

    @property
    def columns(self) -> dict[str, torch.dtype]:
        return {"fading": torch.float32}

    def init(self, view: PromptView) -> dict[str, Tensor]:
        return {"fading": view.mean}

    def update(self, columns: Columns, attention: Tensor, visible: Visible) -> None:
        columns["fading"].mul_(1.0 - 1.0 / self.window).add_(attention)

    def score(self, view: StepView) -> Tensor:
        past = (view.pos >= 0) & (view.pos < view.position - self.window)
        order = selection.order_of(view.pos)
        worth = selection.pool(view.column("fading"), order, past, self.kernel, "avg")
        luck = worth.clamp(min=1e-30).log() + gumbel(view.uniform(self.seed))
        # Sinks count among the rows that stay because of their values, as in the release.
        wide = ranges(view).masked_fill(~past | (view.pos < self.sinks), -torch.inf)
        count = (view.cap.to(torch.float64) * self.large).to(torch.int64)[:, None] - self.sinks
        edge = wide.sort(1, descending=True).values.gather(
            1, (count - 1).clamp(0, len(wide[0]) - 1)
        )
        stays = (wide >= edge) & (wide > -torch.inf) & (count > 0)
        # If an adaptive budget gives a head less than the window, the window's rows leave last.
        return luck.masked_fill(stays | ~past, torch.finfo(torch.float32).max)

    differs = (
        "a query's attention fades with each token (one number per token); the release takes the "
        "mean over the last 64 queries, which it stores, and their softmax leaves out the newest "
        "64 tokens",
        "window=32, so that small budgets have room for others; in the release 64",
        "`large` is a share of the budget; the release has a number (1,024 of 4,096 tokens)",
        "draws are seeded by layer, head and token; the release has no seed",
        "prompts are left to the prompt policy, or to --stride; the release also evicts a prompt's "
        "tokens, once the answer has begun",
        "VaSE-DKV, the paper's other form, scores by random projections of keys and values; it is "
        "not here",
    )


def ranges(view: StepView) -> Tensor:
    """float32 [F, N]: the largest minus the smallest number of each row's value. May be anything
    where `view.pos` is -1."""
    assert view.values is not None
    found = by_heads(view, view.values, lambda _, v: v.amax(-1) - v.amin(-1))
    return found.nan_to_num_(0.0, 0.0, 0.0)


METHOD = Method(
    "vase",
    "tokens with large values stay, and others drawn in proportion to attention; a head "
    "grows by `buffer` tokens over its budget, then evicts as many at once",
    rule=VaSE,
    good="long answers",
    paper="2606.03928",
    told="value's range, then a draw",
    state="1 sum per token",
    again="fades",
)
