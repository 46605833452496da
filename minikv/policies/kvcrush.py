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
from minikv.policies import selection
from minikv.policies.base import DeviceSelector, Evidence, PromptView, Selector, best
from minikv.policies.counter_rng import uniform


def anchor(kind: str, marks: Tensor, seed: int, layer: int) -> Tensor:
    """bool [B]: what rows are compared with. marks [B, P]: for each bit, the better half."""
    return _toward(kind, 2 * marks.sum(1) > marks.shape[1], seed, layer)


def _toward(kind: str, major: Tensor, seed: int, layer: int) -> Tensor:
    """`anchor` by what most rows have: major bool [B]."""
    if kind in ("mean", "inv_mean"):
        return major if kind == "mean" else ~major
    bits = torch.arange(len(major), device=major.device)
    if kind == "alternate":
        return bits % 2 == 1
    if kind == "random":
        return uniform(seed, layer, bits) > 0.5
    return torch.full_like(bits, kind == "ones", dtype=torch.bool)


def ranks(rows: int, count: int, how: str) -> list[int]:
    """Which of `rows` sorted candidates stand for all: `ends` takes the first, the last and even
    steps between, `step` every (rows // count)-th from the first (the release in OpenVINO)."""
    if how == "step":
        return [i * (rows // count) for i in range(count)]
    return [round(i * (rows - 1) / (count - 1)) if count > 1 else 0 for i in range(count)]


def device_ranks(rows: Tensor, count: Tensor, how: str, most: int) -> Tensor:
    """`ranks` of every head, int64 [H, most], of which the first count[h] mean something."""
    places = torch.arange(most, device=rows.device)
    if how == "step":
        return places * (rows // count.clamp(min=1))[:, None]
    far = (places * (rows - 1)[:, None]).to(torch.float64)
    return (far / (count - 1).clamp(min=1)[:, None]).round().to(torch.int64)


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

    def choose(view: PromptView, scores: Tensor, free: Tensor, counts: Sequence[int]) -> Tensor:
        if not bool(free.any()):
            return free
        # Heads may hold different rows after an earlier prompt: bits belong to positions.
        places, index = torch.unique(torch.where(free, view.pos, -1), return_inverse=True)
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


def device_select(options: Mapping[str, object], evidence: Evidence) -> DeviceSelector:
    """`select` where the scores are."""
    ratio, how = options["ratio"], str(options["ranks"])
    assert isinstance(ratio, float)

    def choose(view: PromptView, scores: Tensor, free: Tensor, counts: Tensor, most: int) -> Tensor:
        extra = (counts.to(torch.float64) * ratio).round().to(torch.int64)
        chosen = selection.best(scores, view.pos, free, counts - extra, most)
        rest = free & ~chosen
        left = rest.sum(1)
        distance = _distances(options, evidence, view, scores, free)
        key = (distance << 40) | view.pos.clamp(min=0)
        order = key.masked_fill(~rest, torch.iinfo(torch.int64).max).argsort(dim=1)
        wide = min(free.shape[1], round(ratio * most))
        rank = device_ranks(left, extra, how, wide)
        valid = (torch.arange(wide, device=free.device) < extra[:, None]) & (left > extra)[:, None]
        row = order.gather(1, rank.clamp(0, free.shape[1] - 1)).masked_fill(~valid, free.shape[1])
        taken = torch.zeros((len(free), free.shape[1] + 1), dtype=torch.bool, device=free.device)
        taken.scatter_(1, row, True)
        return chosen | taken[:, :-1] | (rest & (left <= extra)[:, None])

    return choose


def _distances(
    options: Mapping[str, object],
    evidence: Evidence,
    view: PromptView,
    scores: Tensor,
    free: Tensor,
) -> Tensor:
    """int64 [H, N]: the Hamming distance of every free row's bits to the anchor.

    Bits belong to positions: a row of another head at the same one brings its own. None is the
    majority's, since half of a head's free rows have it, of as many positions or more.
    """
    seed = options["seed"]
    assert isinstance(seed, int)
    half = free.sum(1) // 2
    marks = torch.stack(
        [
            selection.best(worth, view.pos, free, half, free.shape[1] // 2)
            for worth in worths(view, scores, evidence, str(options["bits"]))
        ],
        1,
    )
    place = (view.pos + 1).masked_fill(~free, 0)
    major = torch.zeros_like(marks[..., 0])
    goal = _toward(str(options["anchor"]), major.flatten(), seed, view.layer).view_as(major)
    # From the distance of a row without bits, each bit that it has is a step.
    step = torch.where(marks, 1 - 2 * goal[..., None].to(torch.int64), 0).sum(1)
    steps = torch.zeros(view.position + 1, dtype=torch.int64, device=free.device)
    steps.scatter_add_(0, place.flatten(), step.flatten())
    return goal.sum() + steps[place]
