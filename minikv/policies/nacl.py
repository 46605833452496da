"""NaCl (arXiv 2408.03675, section 3): the rows that proxy queries attend to stay, and a random
share.

The last queries of the prompt are proxies for all queries. A share of the budget is for the rows
with the most attention from the proxies. The other rows are drawn without replacement, differently
in every layer and head, so that not all heads lose the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minikv.policies import options, selection
from minikv.policies.base import Evidence, PromptView, Scorer
from minikv.policies.counter_rng import gumbel
from minikv.policies.options import Method, option
from minikv.policies.parts import Candidates, Selector


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxies(Scorer):
    """Attention summed over the proxies, mean over the group, not pooled."""

    name = "proxies"
    summary = "attention of proxy queries, summed"

    proxies: int = option(32, "last queries of the prompt that score, always kept", (1, 4096))
    sinks: int = options.sinks()
    non_causal: bool = option(False, "a proxy also sees the tokens after it (the release)")

    @property
    def evidence(self) -> Evidence:
        return Evidence(
            observe=self.proxies,
            asks=True,
            sinks=self.sinks,
            window=self.proxies,
            causal=not self.non_causal,
        )

    def score(self, view: PromptView) -> Tensor:
        return view.mean

    differs = (
        "a proxy does not see the tokens after it; in the release it does (`non_causal`)",
        "all proxies stay; in the release only the last 1 % of the prompt less 256 tokens, which "
        "is none of a prompt below 25,600",
        "`proxies` and `sinks` are numbers of tokens; in the release 1 % of the prompt and 256, in "
        "the paper about 10 %",
        "a KV head is judged by the mean of its query heads; the release may take a query head of "
        "another one",
        "evicts after a prompt; the paper may also evict every few tokens of an answer",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw(Selector):
    """The best rows, and a seeded draw from the others: in proportion to their scores, or to their
    ranks where scores do not add up."""

    name = "draw"
    summary = "a share of each head's tokens is drawn"

    random: float = option(0.35, "share of the free budget that is drawn", (0.0, 1.0))
    draw: str = option(
        "score",
        "score: in proportion to the score; softmax: to its exponential (the release)",
        ("score", "softmax"),
    )
    temperature: float = option(1.0, "above 1 the draw is more even", (0.01, 1e6))
    seed: int = options.seed()

    def select(self, rows: Candidates, counts: Tensor, most: int) -> Tensor:
        view, free = rows.view, rows.free
        drawn = (counts.to(torch.float64) * self.random).to(torch.int64)
        sure = rows.best(counts - drawn, most)
        adds_up = rows.scorer.evidence.adds_up
        worth = rows.scores if adds_up else selection.ranked(rows.scores, view.pos, free)
        weight = worth if self.draw == "softmax" else worth.clamp(min=1e-30).log()
        luck = weight / self.temperature + gumbel(view.uniform(self.seed))
        rest = replace(rows, scores=luck, free=free & ~sure, counted=None)
        return rest.best(drawn, most, also=sure)

    differs = (
        "draw=score: a token is drawn in proportion to its score; the release draws by a softmax "
        "of summed scores, which is nearly even (draw=softmax)",
        "random=0.35 of the free budget; the release has 7 of 19 parts, and the paper's best is "
        "about 0.7",
        "draws are seeded by layer and head; the release has no seed",
    )


METHOD = Method(
    "nacl",
    "tokens that proxy queries attend to, and a share drawn at random in every head",
    parts=(Proxies, Draw),
    good="comparisons",
    paper="2408.03675",
)
