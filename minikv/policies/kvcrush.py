"""KVCrush (arXiv 2503.00022, section 3): beside the important rows, representatives of the others.

Every row has one bit per KV head, or per query head as in the paper: whether it is in the better
half of that head's rows. The rows that a head would lose are sorted by the Hamming distance of
their bits to an anchor, then by position. Representatives are taken from them at even steps, from
the nearest to the farthest. The paper does not define its buckets, and the two releases differ.
Here tokens are chosen, not pages, and each head chooses only among the rows that it would lose, so
no row is taken twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minikv.errors import UsageError
from minikv.kernels.torch.counter_rng import uniform
from minikv.policies.base import Candidates, Scorer, Selector


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCrush(Selector):
    """Gives the share `ratio` of each head's free budget to representatives."""

    ratio: float
    bits: str
    anchor: str
    ranks: str
    seed: int

    def check(self, scorer: Scorer) -> None:
        if self.bits == "query" and not scorer.evidence.observe:
            raise UsageError(
                "kvcrush: bits=query needs a score of attention, which differs by query head",
                "leave it at bits=kv",
            )

    def select(self, rows: Candidates, counts: Tensor, most: int) -> Tensor:
        view, free = rows.view, rows.free
        extra = (counts.to(torch.float64) * self.ratio).round().to(torch.int64)
        chosen = view.ops.best(rows.scores, view.pos, free, counts - extra, most)
        rest = free & ~chosen
        left = rest.sum(1)
        key = (self._distances(rows) << 40) | view.pos.clamp(min=0)
        order = key.masked_fill(~rest, torch.iinfo(torch.int64).max).argsort(dim=1)
        wide = min(free.shape[1], round(self.ratio * most))
        rank = ranks(left, extra, self.ranks, wide)
        valid = (torch.arange(wide, device=free.device) < extra[:, None]) & (left > extra)[:, None]
        row = order.gather(1, rank.clamp(0, free.shape[1] - 1)).masked_fill(~valid, free.shape[1])
        taken = torch.zeros((len(free), free.shape[1] + 1), dtype=torch.bool, device=free.device)
        taken.scatter_(1, row, True)
        return chosen | taken[:, :-1] | (rest & (left <= extra)[:, None])

    def _distances(self, rows: Candidates) -> Tensor:
        """int64 [H, N]: the Hamming distance of every free row's bits to the anchor.

        Bits belong to positions: rows of other heads at the same position add theirs. Most rows
        have none of the bits: half of a head's free rows have its bit, and the heads together have
        at least as many positions as one head has rows.
        """
        view, free = rows.view, rows.free
        half = free.sum(1) // 2
        marks = torch.stack(
            [
                view.ops.best(worth, view.pos, free, half, free.shape[1] // 2)
                for worth in self._worths(rows)
            ],
            1,
        )
        place = (view.pos + 1).masked_fill(~free, 0)
        major = torch.zeros_like(marks[..., 0])
        goal = anchor(self.anchor, major.flatten(), self.seed, view.layer).view_as(major)
        # Start from the distance of a row without bits; each bit that is set adds 1 or -1.
        step = torch.where(marks, 1 - 2 * goal[..., None].to(torch.int64), 0).sum(1)
        steps = torch.zeros(view.position + 1, dtype=torch.int64, device=free.device)
        steps.scatter_add_(0, place.flatten(), step.flatten())
        return goal.sum() + steps[place]

    def _worths(self, rows: Candidates) -> list[Tensor]:
        """The scores that decide each bit, float32 [H, N] each: those of the KV heads, or of each
        query head of the group."""
        mass = rows.view.mass
        if self.bits == "kv":
            return [rows.scores]
        assert mass is not None
        views = (replace(rows.view, mass=mass[:, g : g + 1]) for g in range(mass.shape[1]))
        return [rows.scorer.score(view) for view in views]


def anchor(kind: str, major: Tensor, seed: int, layer: int) -> Tensor:
    """bool [B]: the bits that a row's bits are compared with. major bool [B]: the bits of most
    rows."""
    if kind in ("mean", "inv_mean"):
        return major if kind == "mean" else ~major
    bits = torch.arange(len(major), device=major.device)
    if kind == "alternate":
        return bits % 2 == 1
    if kind == "random":
        return uniform(seed, layer, bits) > 0.5
    return torch.full_like(bits, kind == "ones", dtype=torch.bool)


def ranks(rows: Tensor, count: Tensor, how: str, most: int) -> Tensor:
    """Which of `rows` sorted candidates are the representatives: int64 [H, most], of which the
    first count[h] are valid. how: "ends" takes the first, the last and even steps between them;
    "step" takes every (rows // count)-th from the first (the release in OpenVINO). rows and count
    int64 [H].
    """
    places = torch.arange(most, device=rows.device)
    if how == "step":
        return places * (rows // count.clamp(min=1))[:, None]
    far = (places * (rows - 1)[:, None]).to(torch.float64)
    return (far / (count - 1).clamp(min=1)[:, None]).round().to(torch.int64)
