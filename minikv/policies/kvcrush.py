"""KVCrush (arXiv 2503.00022, section 3): the important rows, and representatives of the others.

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
from minikv.policies import options, snapkv
from minikv.policies.base import Scorer
from minikv.policies.counter_rng import uniform
from minikv.policies.options import Method, option
from minikv.policies.parts import Candidates, Selector

_LAST = torch.iinfo(torch.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCrush(Selector):
    """Uses the share `ratio` of each head's free budget for representatives."""

    name = "kvcrush"
    summary = "representatives and the best tokens"

    ratio: float = option(0.25, "share of the free budget for representatives", (0.0, 1.0))
    bits: str = option(
        "kv", "one bit of a token per KV head or, as in the paper, per query head", ("kv", "query")
    )
    anchor: str = option(
        "mean",
        "what the bits of a token are compared with",
        ("mean", "inv_mean", "alternate", "random", "zeros", "ones"),
    )
    ranks: str = option(
        "ends",
        "ends: evenly from the nearest to the farthest; step: evenly from the nearest (OpenVINO)",
        ("ends", "step"),
    )
    seed: int = options.seed()

    def check(self, scorer: Scorer) -> None:
        if self.bits == "query" and not scorer.evidence.observe:
            raise UsageError(
                "kvcrush: bits=query needs a score from attention, which differs by query head",
                "use bits=kv, the default",
            )

    def select(self, rows: Candidates, counts: Tensor, most: int) -> Tensor:
        view, free = rows.view, rows.free
        share = torch.tensor(self.ratio, dtype=torch.float64)
        extra = (counts * share).round().to(torch.int64)
        chosen = rows.best(counts - extra, most)
        marks = self._marks(rows)
        major = torch.zeros_like(marks[..., 0])
        goal = anchor(self.anchor, major.flatten(), self.seed, view.layer).view_as(major)
        key, left = crush_keys(marks, goal, view.pos, free, chosen, view.position)
        wide = min(free.shape[1], round(self.ratio * most))
        represent(chosen, key.argsort(dim=1), left, extra, self.ranks, wide)
        return chosen

    def _marks(self, rows: Candidates) -> Tensor:
        """bool [H, B, N]: whether each row has each bit of its head.

        Most rows have none of the bits: only half of a head's free rows have its bit, and the heads
        together have at least as many positions as one head has rows.
        """
        half, most = rows.have // 2, rows.free.shape[1] // 2
        found = [each.best(half, most) for each in self._bits(rows)]
        return torch.stack(found, 1) if len(found) > 1 else found[0][:, None]

    def _bits(self, rows: Candidates) -> list[Candidates]:
        """The rows with the scores that decide each bit: those of the KV heads, or of each query
        head of the group."""
        mass = rows.view.mass
        if self.bits == "kv":
            return [rows]
        assert mass is not None
        views = (replace(rows.view, mass=mass[:, g : g + 1]) for g in range(mass.shape[1]))
        return [replace(rows, scores=rows.scorer.score(view)) for view in views]

    differs = (
        "bits=kv: a token has one bit per KV head; in the paper one per query head (bits=query)",
        "each KV head chooses among the tokens that it loses itself; OpenVINO and vLLM's branch "
        "choose once for all heads, the latter by what the first one loses, so that others keep a "
        "token twice",
        "tokens, not pages or blocks; representatives are part of the budget, in OpenVINO they "
        "come on top",
        "the paper leaves its buckets open: here even ranks by distance to one anchor, then by "
        "position (`ranks`)",
        "anchor=mean; OpenVINO's default is random (`anchor`)",
    )


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


def crush_keys(
    marks: Tensor, goal: Tensor, pos: Tensor, free: Tensor, chosen: Tensor, position: int
) -> tuple[Tensor, Tensor]:
    """The order of the candidates, which are the free rows that are not chosen: (key int64 [H, N],
    their number in each head, int64 [H]).

    The key has the Hamming distance of a row's bits to the anchor from bit 40 on, and the position,
    which is less than `position`, in the lower bits. Other rows have the largest key.

    marks bool [H, B, N]: the rows that have each bit; pos int64, free and chosen bool [H, N]. Bits
    belong to positions: rows of other heads at the same position add their bits. goal bool [H, B]:
    the bits of the anchor.
    """
    place = (pos + 1).masked_fill(~free, 0)
    # Start from the distance of a row without bits; each bit that is set adds 1 or -1.
    step = torch.where(marks, 1 - 2 * goal[..., None].to(torch.int64), 0).sum(1)
    steps = torch.zeros(position + 1, dtype=torch.int64, device=pos.device)
    steps.scatter_add_(0, place.flatten(), step.flatten())
    rest = free & ~chosen
    key = ((goal.sum() + steps[place]) << 40) | pos.clamp(min=0)
    return key.masked_fill(~rest, _LAST), rest.sum(1)


def represent(
    chosen: Tensor, order: Tensor, left: Tensor, count: Tensor, how: str, most: int
) -> None:
    """Add count[h] representatives of each head's candidates to chosen bool [H, N], in place, or
    all candidates if there are no more than that.

    order int64 [H, N]: the rows, candidates first. left int64 [H]: how many candidates there are.
    how: see `ranks`. No count exceeds `most`.
    """
    rows, every = order.shape[1], left <= count
    places = torch.arange(most, device=order.device)
    rank = torch.where(every[:, None], places, ranks(left, count, how, most))
    valid = places < torch.minimum(left, count)[:, None]
    row = order.gather(1, rank.clamp(0, rows - 1)).masked_fill(~valid, rows)
    taken = torch.zeros((len(order), rows + 1), dtype=torch.bool, device=order.device)
    chosen |= taken.scatter_(1, row, True)[:, :-1]


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


METHOD = Method(
    "kvcrush",
    "SnapKV's tokens, and representatives of those that leave; kvcrush(h2o) and the like take "
    "another base",
    parts=(snapkv.SnapKV, KVCrush),
    good="a question, short answer",
    paper="2503.00022",
    preset={"sinks": 4},
)
