"""NaCl (arXiv 2408.03675, section 3): the rows that proxy queries attend to, and a random share.

The last queries of the prompt are proxies for all queries. A part of the budget goes to the rows
with the most attention from the proxies. The rest is drawn without replacement, differently in
every layer and head, so that not all heads lose the same rows. Departures from the release: proxies
are causal, and all of their rows stay; draws are in proportion to the attention itself, because a
softmax over its sums is nearly uniform; counts are absolute numbers, so that short prompts work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minikv.policies import selection
from minikv.policies.base import Candidates, Evidence, PromptView, Scorer, Selector
from minikv.policies.counter_rng import gumbel, row_uniform


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxies(Scorer):
    """Attention summed over the proxies, mean over the group, not pooled."""

    proxies: int
    sinks: int
    non_causal: bool

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
        assert view.mass is not None
        return view.mass.mean(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw(Selector):
    """The best rows, and a seeded draw from the others. random: the share of rows that is drawn.
    Draws are in proportion to the scores, or to their ranks where scores do not add up."""

    random: float
    draw: str
    temperature: float
    seed: int

    def select(self, rows: Candidates, counts: Tensor, most: int) -> Tensor:
        view, free = rows.view, rows.free
        drawn = (counts.to(torch.float64) * self.random).to(torch.int64)
        sure = rows.best(counts - drawn, most)
        adds_up = rows.scorer.evidence.adds_up
        worth = rows.scores if adds_up else selection.ranked(rows.scores, view.pos, free)
        weight = worth if self.draw == "softmax" else worth.clamp(min=1e-30).log()
        drawn_from = row_uniform(self.seed, view.layer, view.position, view.pos)
        luck = weight / self.temperature + gumbel(drawn_from)
        rest = replace(rows, scores=luck, free=free & ~sure, counted=None)
        return rest.best(drawn, most, also=sure)
