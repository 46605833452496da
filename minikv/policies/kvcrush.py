"""KVCrush (arXiv 2503.00022, section 3): beside the important rows, representatives of the others.

Every row has one bit per KV head, or per query head as in the paper: whether it is in the better
half of that head's rows. The rows that a head is about to lose are put in order by the Hamming
distance of their bits to an anchor, then by position, and representatives are taken at even steps
from the nearest to the farthest. The text leaves the buckets open, and the two releases differ;
this is the token-level form with eligibility per head, so that no row is taken twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from minikv.errors import UsageError
from minikv.noise import uniform
from minikv.policy import Evidence, PromptView, Selector, best


def anchor(kind: str, marks: Tensor, seed: int, layer: int) -> Tensor:
    """bool [B]: what rows are compared with. marks [B, P]: for each bit, the better half."""
    heads = torch.arange(len(marks), device=marks.device)
    if kind in ("mean", "inv_mean"):
        major = marks.float().mean(1) > 0.5
        return major if kind == "mean" else ~major
    if kind == "alternate":
        return heads % 2 == 1
    if kind == "random":
        return uniform(seed, layer, heads) > 0.5
    return torch.full_like(heads, kind == "ones", dtype=torch.bool)


def ranks(rows: int, count: int, how: str) -> list[int]:
    """Which of `rows` sorted candidates stand for all: `ends` takes the first, the last and even
    steps between, `step` every (rows // count)-th from the first (the release in OpenVINO)."""
    if how == "step":
        return [i * (rows // count) for i in range(count)]
    return [round(i * (rows - 1) / (count - 1)) if count > 1 else 0 for i in range(count)]


def worths(view: PromptView, scores: Tensor, evidence: Evidence, bits: str) -> list[Tensor]:
    """What each bit is decided by, float32 [H, N] each: the scores, or every query head's own."""
    if bits == "kv":
        return [scores]
    assert view.mass is not None
    heads = range(view.mass.shape[1])
    return [evidence.scorer(replace(view, mass=view.mass[:, g : g + 1])) for g in heads]


def select(options: Mapping[str, object], evidence: Evidence) -> Selector:
    """A `ratio` of each head's free budget goes to representatives."""
    ratio, seed, bits = options["ratio"], options["seed"], str(options["bits"])
    kind, how = str(options["anchor"]), str(options["ranks"])
    assert isinstance(ratio, float)
    assert isinstance(seed, int)
    if bits == "query" and not evidence.observe:
        raise UsageError(
            "kvcrush: bits=query needs a score of attention, which differs by query head",
            "leave it at bits=kv",
        )

    def choose(
        view: PromptView, scores: Tensor, free: Tensor, counts: Sequence[int]
    ) -> Tensor:
        if not bool(free.any()):
            return free
        # Heads may hold different rows after an earlier prompt: bits belong to positions.
        places, index = torch.unique(
            torch.where(free, view.pos, -1), return_inverse=True
        )
        judged = worths(view, scores, evidence, bits)
        shape = (len(free), len(judged), len(places))
        marks = torch.zeros(shape, dtype=torch.bool, device=free.device)
        for h in range(len(free)):
            for g, worth in enumerate(judged):
                half = best(worth[h], view.pos[h], free[h], int(free[h].sum()) // 2)
                marks[h, g, index[h, half]] = True
        marks = marks.flatten(0, 1)
        goal = anchor(kind, marks[:, places >= 0], seed, view.layer)
        distance = (marks != goal[:, None]).sum(0)
        chosen = torch.zeros_like(free)
        for h, count in enumerate(counts):
            extra = min(round(ratio * count), count)
            chosen[h] = best(scores[h], view.pos[h], free[h], count - extra)
            rest = (free[h] & ~chosen[h]).nonzero().squeeze(1)
            if len(rest) <= extra:
                chosen[h, rest] = True
            elif extra:
                rest = rest[torch.argsort(view.pos[h, rest], stable=True)]
                rest = rest[torch.argsort(distance[index[h, rest]], stable=True)]
                taken = torch.tensor(ranks(len(rest), extra, how), device=free.device)
                chosen[h, rest[taken]] = True
        return chosen

    return choose
