"""TriAttention (arXiv 2604.04921): rows stay that the mean query would look at from the positions
to come.

Before rotation, a head's queries lie close to a centre, which is their mean. So the attention that
later queries give a row follows from the centre and from the distance: it is a trigonometric series
of the distance, with one frequency for each pair of numbers. It is averaged over the distances of
queries 1, 2, 4, ... positions ahead. A second term is for what differs from the centre: the lengths
of the pairs of the key, each weighted by how much longer queries are there than their mean. The
query heads of a KV head are compared after each is standardised over the head's rows, and the
largest counts. A head adds `buffer` new rows, then evicts as many at once.

Keys are stored rotated. So the series is the product of the key with the centre, which is rotated
by the mean over these positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.policies import options
from minikv.policies.base import StepPolicy, StepView
from minikv.policies.options import Method, option
from minikv.policies.some_heads import by_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class TriAttention(StepPolicy):
    """What it learns of a head: how many queries there were, then for each query head their sum [G,
    D], then the sum of the lengths of their pairs of numbers [G, D / 2]."""

    sinks: int = options.sinks()
    recent: int = options.recent(1)
    buffer: int = option(128, "how many tokens a head adds before it evicts as many", (1, 4096))
    future: int = option(
        1 << 16, "how far ahead the queries are that count: 1, 2, 4, ... tokens", (1, 1 << 20)
    )
    norm: bool = option(True, "add the term for what differs from the mean query")
    name: str = "triattention"
    learns: bool = True

    @property
    def block(self) -> int:  # type: ignore[override]
        return self.buffer

    def learnt_size(self, group: int, size: int) -> int:
        return 1 + group * size + group * (size // 2)

    def learn(self, learnt: Tensor, queries: Tensor) -> None:
        learnt[:, 0] += queries.shape[2]
        sums, lengths = queries.sum(2), pair_lengths(queries).sum(2)
        learnt[:, 1:] += torch.cat((sums.flatten(1), lengths.flatten(1)), 1)

    def score(self, view: StepView) -> Tensor:
        assert view.keys is not None
        assert view.learnt is not None
        cos, sin = self._turn(view)  # [F, D / 2]
        centre, rest = centres(view.learnt, 2 * cos.shape[1])  # [F, G, D], [F, G, D / 2]
        one, two = centre.chunk(2, -1)
        cos, sin = cos[:, None], sin[:, None]
        ahead = torch.cat((one * cos - two * sin, two * cos + one * sin), -1)

        def worths(some: Tensor, key: Tensor) -> Tensor:
            worth = ahead[some] @ key.transpose(1, 2)  # [f, G, N]
            if self.norm:
                worth += rest[some] @ pair_lengths(key).transpose(1, 2)
            return standardised(worth, view.free[some, None]).amax(1)

        return by_heads(view, view.keys, worths).nan_to_num_(0.0, 0.0, 0.0)

    def _turn(self, view: StepView) -> tuple[Tensor, Tensor]:
        """Cosine and sine float32 [F, D / 2] of each head's layer, their mean over the positions
        ahead."""
        assert view.rotary is not None, "the network's rotary frequencies are not known"
        last = view.layer + len(view.pos) // view.heads
        ahead = 2 ** torch.arange(self.future.bit_length(), device=view.pos.device)
        at = (ahead + view.position - 1).to(torch.float64)
        inverse = torch.stack([one.inverse for one in view.rotary.layers[view.layer : last]])
        angle = at[:, None] * inverse.to(torch.float64)[:, None]  # [l, T, D / 2]
        cos, sin = (x.mean(1).float() for x in (angle.cos(), angle.sin()))
        cos, sin = (x[:, None].expand(-1, view.heads, -1).flatten(0, 1) for x in (cos, sin))
        return cos, sin

    differs = (
        "the mean queries are those of all prompts and answers so far; the release measures them "
        "once for each network, on a text of its own",
        "the first tokens and the newest stay (`sinks`, `recent`); the release protects all of the "
        "prompt instead, and no newest tokens",
        "scores are standardised over the tokens that may leave; in the release over all of the "
        "answer's",
        "prompts are left to the prompt policy, or to --stride",
        "a budget counts the tokens that are left after an eviction, up to `buffer` fewer than a "
        "head holds; the release evicts at the end of every 128 steps",
    )


def centres(learnt: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The mean of the queries, float32 [F, G, D], and by how much the mean length of each pair of
    numbers is larger than the length of that of the mean, [F, G, D / 2]. learnt: see
    `TriAttention`; D: `size`."""
    group = 2 * (learnt.shape[1] - 1) // (3 * size)
    means = learnt[:, 1:] / learnt[:, :1].clamp(min=1.0)
    centre = means[:, : group * size].reshape(-1, group, size)
    lengths = means[:, group * size :].reshape(-1, group, size // 2)
    return centre, (lengths - pair_lengths(centre)).clamp(min=0.0)


def pair_lengths(x: Tensor) -> Tensor:
    """The lengths [..., D / 2] of the pairs of numbers of x [..., D] that are rotated together."""
    one, two = x.chunk(2, -1)
    return torch.hypot(one, two)


def standardised(worth: Tensor, counts: Tensor) -> Tensor:
    """Scores [..., N] minus their mean, divided by their standard deviation, both over the rows
    that are in `counts` bool [..., N]. Others may hold any value."""
    worth = worth.masked_fill(~counts, 0.0)
    many = counts.sum(-1, keepdim=True).clamp(min=1)
    apart = (worth - worth.sum(-1, keepdim=True) / many).masked_fill(~counts, 0.0)
    return apart / (apart.square().sum(-1, keepdim=True) / many).sqrt().clamp(min=1e-6)


METHOD = Method(
    "triattention",
    "tokens that the mean query would look at from the positions to come; a head grows by `buffer` "
    "tokens over its budget, then evicts as many at once",
    rule=TriAttention,
    good="long answers",
    paper="2604.04921",
    told="mean query at later distances",
    state="mean queries per head",
    again="fades",
)
