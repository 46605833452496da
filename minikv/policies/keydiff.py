"""KeyDiff (arXiv 2504.15364): rows whose key is unlike the others stay; no attention is needed.

A row's worth is minus the cosine between its key and the mean of all unit-length keys of its head.
With `block`, rows are chosen block by block, as when the paper reads a prompt in blocks (section
4): after every block the best rows of those kept so far and of the block stay, compared with the
mean of just these rows. Unlike in the paper, attention stays exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.kernels import order_key
from minikv.policies import options
from minikv.policies.base import Evidence, PromptView, Scorer
from minikv.policies.options import Method, option
from minikv.policies.selection import in_blocks

_SINK = 1 << 62  # above every order key
_LEFT = 4.0  # subtracted from the worth (-1 to 1) of rows that a block has dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDiff(Scorer):
    """Distance from the mean direction."""

    name = "keydiff"
    summary = "key unlike the others"

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
        return Evidence(sinks=self.sinks, window=self.recent, adds_up=False, copies="k", vectors=1)

    def score(self, view: PromptView) -> Tensor:
        key = view.key()

        def of(some: slice) -> Tensor:
            length = torch.linalg.vector_norm(key[some], dim=-1, keepdim=True, dtype=torch.float32)
            unit = key[some] / length.clamp(min=1e-12)
            unit.masked_fill_(view.pos[some, :, None] < 0, 0.0)
            return self._in_blocks(view, some, unit) if self.block else distances(unit)

        return in_blocks(len(key), key[0].numel(), view.ops.block, of)

    def _in_blocks(self, view: PromptView, some: slice, unit: Tensor) -> Tensor:
        """float32 [h, N]: scores of some heads' rows, chosen block by block. Rows that are kept
        after the last block score above all dropped rows. unit [h, N, D]: the heads' keys of length
        1."""
        pos, live, keeps = view.pos[some], view.live[some], max(1, view.budget)
        heads = torch.arange(len(pos), device=pos.device)[:, None]
        order = pos.masked_fill(~live, view.position).argsort(dim=1, stable=True)
        worth = torch.zeros(pos.shape, device=pos.device)
        left = order[:, :keeps]
        for lo in range(keeps, max(order.shape[1], keeps + 1), self.block):
            rows = torch.cat((left, order[:, lo : lo + self.block]), 1)
            place, real = pos.gather(1, rows), live.gather(1, rows)
            found = distances(unit[heads, rows])
            worth.scatter_(1, rows, found - _LEFT)
            key = order_key(found, place, real)
            key = torch.where(place < self.sinks, key.clamp(min=_SINK), key)
            best = key.masked_fill(~real, -_SINK).argsort(dim=1, descending=True, stable=True)
            best = best[:, :keeps]
            left = rows.gather(1, best)
            worth.scatter_(1, left, found.gather(1, best))
        return worth

    differs = (
        "the first 4 and the newest 10 tokens stay; paper and kvpress protect none (`sinks`, "
        "`recent`)",
        "in the paper a prompt is read in blocks, and later blocks do not see what left; here all "
        "are compared once, or (`block`) block by block, as in kvpress, and attention stays exact",
    )


def distances(unit: Tensor) -> Tensor:
    """float32 [h, N]: minus the cosine between rows of length 1 (or 0) [h, N, D] and the mean of
    their head's."""
    mean = F.normalize(unit.sum(1), dim=1)
    return -(unit @ mean[..., None])[..., 0]


METHOD = Method(
    "keydiff",
    "tokens whose key is unlike the others stay; reads no attention",
    parts=(KeyDiff,),
    good="comparisons",
    paper="2504.15364",
)
