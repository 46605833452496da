"""KeyDiff (arXiv 2504.15364): rows whose key is unlike the others stay; no attention is needed.

A row's worth is minus the cosine between its key and the mean of all unit-length keys of its head.
With `block`, rows are chosen block by block, as when the paper reads a prompt in blocks (section
4): after every block the best rows of those kept so far and of the block stay, compared with the
mean of just these rows. Unlike in the paper, attention stays exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.kernels.torch.distances import distances, units
from minikv.policies import options
from minikv.policies.base import Evidence, PromptView, Scorer
from minikv.policies.facts import Method, Part
from minikv.policies.options import option
from minikv.policies.selection import order_key

_LEFT = 4.0  # subtracted from the worth (-1 to 1) of rows that a block has dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDiff(Scorer):
    """Distance from the mean direction; block: rows of a block, 0: all rows at once."""

    sinks: int = options.sinks()
    recent: int = options.recent()
    block: int = option(
        0,
        "choose after every block of this many tokens, as the paper does (128 in kvpress); 0: "
        "choose once, from all tokens",
        (0, 1 << 20),
    )

    @property
    def evidence(self) -> Evidence:
        return Evidence(sinks=self.sinks, window=self.recent, adds_up=False)

    def score(self, view: PromptView) -> Tensor:
        key = view.key()
        if not self.block:
            return view.ops.key_distances(key, view.pos)
        return torch.stack([self._in_blocks(view, h, key[h]) for h in range(len(key))])

    def _in_blocks(self, view: PromptView, head: int, key: Tensor) -> Tensor:
        """float32 [N]: scores of a head's rows, chosen block by block. Rows that are kept after the
        last block score above all that were dropped. key [N, D]: the head's."""
        pos, live, keeps = view.pos[head], view.live[head], max(1, view.budget)
        unit = units(key, pos)
        order = pos.masked_fill(~live, view.position).argsort(stable=True)
        worth = torch.zeros(len(pos), device=pos.device)
        left = order[:keeps]
        for lo in range(keeps, max(len(order), keeps + 1), self.block):
            rows = torch.cat((left, order[lo : lo + self.block]))
            found = distances(unit[rows])
            worth.index_copy_(0, rows, found - _LEFT)
            key = order_key(found, pos[rows], live[rows])
            key = torch.where(pos[rows] < self.sinks, key.clamp(min=_SINK), key)
            best = key.masked_fill(~live[rows], -_SINK).argsort(descending=True, stable=True)
            best = best[:keeps]
            left = rows[best]
            worth.index_copy_(0, left, found[best])
        return worth


_SINK = 1 << 62  # above every order key


SCORER = Part(
    "keydiff",
    KeyDiff,
    "key unlike the others",
    differs=(
        "the first 4 and the newest 10 tokens stay; paper and kvpress protect none (`sinks`, "
        "`recent`)",
        "in the paper a prompt is read in blocks, and later blocks do not see what left; here all "
        "are compared once, or (`block`) block by block, as in kvpress, and attention stays exact",
    ),
)

METHOD = Method(
    "keydiff",
    "tokens whose key is unlike the others stay; reads no attention",
    parts=(SCORER,),
    paper="2504.15364",
    scores="key unlike the others",
    second="safe",
)
