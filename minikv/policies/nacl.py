"""NaCl (arXiv 2408.03675, section 3): the rows that proxy queries attend to, and a random share.

The last queries of the prompt stand for all. Part of the budget goes to the rows with the most
proxy attention, the rest is drawn without replacement, differently in every layer and head, so
that no head is blind to the same rows. Departures from the release, for the reasons that its
numbers give: proxies are causal and all of them stay; draws follow the attention itself, since a
softmax over its sums is all but uniform; counts are absolute, so that short prompts work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from minikv.policies import selection
from minikv.policies.base import DeviceSelector, Evidence, PromptView, Selector, best, ends, ranked
from minikv.policies.counter_rng import gumbel


def scorer(options: Mapping[str, object]) -> Evidence:
    """Attention of the proxies, summed over them, mean over the group; not pooled."""
    proxies, sinks = options["proxies"], options["sinks"]
    assert isinstance(proxies, int)
    assert isinstance(sinks, int)

    def score(view: PromptView) -> Tensor:
        assert view.mass is not None
        return view.mass.mean(1)

    return Evidence(
        score,
        ends(sinks, proxies),
        observe=proxies,
        asks=True,
        sinks=sinks,
        window=proxies,
        causal=not options["non_causal"],
    )


def select(options: Mapping[str, object], evidence: Evidence) -> Selector:
    """The best rows, and a seeded draw from the rest, in proportion to scores or to ranks."""
    random, temperature, seed = options["random"], options["temperature"], options["seed"]
    assert isinstance(random, float)
    assert isinstance(temperature, float)
    assert isinstance(seed, int)
    softmax = options["draw"] == "softmax"

    def choose(view: PromptView, scores: Tensor, free: Tensor, counts: Sequence[int]) -> Tensor:
        chosen = torch.zeros_like(free)
        worth = scores if evidence.weighs else ranked(scores, view.pos, free)
        for h, count in enumerate(counts):
            drawn = int(random * count)
            sure = best(scores[h], view.pos[h], free[h], count - drawn)
            rest = free[h] & ~sure
            weight = worth[h] if softmax else worth[h].clamp(min=1e-30).log()
            key = weight / temperature + gumbel(
                seed, view.layer, torch.tensor(h, device=free.device), view.position, view.pos[h]
            )
            chosen[h] = sure | best(key, view.pos[h], rest, drawn)
        return chosen

    return choose


def device_select(options: Mapping[str, object], evidence: Evidence) -> DeviceSelector:
    """`select` where the scores are."""
    random, temperature, seed = options["random"], options["temperature"], options["seed"]
    assert isinstance(random, float)
    assert isinstance(temperature, float)
    assert isinstance(seed, int)
    softmax = options["draw"] == "softmax"

    def choose(view: PromptView, scores: Tensor, free: Tensor, counts: Tensor, most: int) -> Tensor:
        worth = scores if evidence.weighs else ranked(scores, view.pos, free)
        drawn = (counts.to(torch.float64) * random).to(torch.int64)
        sure = selection.best(scores, view.pos, free, counts - drawn, most)
        weight = worth if softmax else worth.clamp(min=1e-30).log()
        heads = torch.arange(len(free), device=free.device)[:, None]
        key = weight / temperature + gumbel(seed, view.layer, heads, view.position, view.pos)
        return sure | selection.best(key, view.pos, free & ~sure, drawn, most)

    return choose
