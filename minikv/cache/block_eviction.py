"""For step policies that evict several rows of a head at once (`StepPolicy.block`): at which steps
a head can be full, and how the gaps between the rows that stay are closed."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from minikv.cache.arena import Arena
from minikv.policies.base import StepPolicy


class Schedule:
    """Knows, without asking the device, at which steps of an answer a head may have to evict. No
    other step needs to choose victims.

    A head evicts `block` rows every `block` steps. Where rows slide out of a layer's window, a head
    grows more slowly: the schedule `drifts`, and each step reports to `note_left`.
    """

    def __init__(
        self, policy: StepPolicy | None, arena: Arena, position: int, *, slides: bool
    ) -> None:
        """position: tokens counted so far; slides: rows slide out of a layer's window."""
        self.block = 1 if policy is None else policy.block
        self._cap, self._phases = arena.cap, frozenset[int]()
        self._known = position, 0  # see `note_left`
        self.drifts = slides and self.block > 1
        if self.block == 1:
            return
        steps = (arena.cap + self.block - arena.held).flatten().tolist()
        if slides:
            self._known = position, min(steps) - 1
        else:
            self._phases = frozenset((position + left) % self.block for left in steps)

    def left(self, count: Tensor) -> Tensor:
        """int64 []: how many more steps no head has to evict, at least, if the heads use `count`
        [L, H] rows, the new ones included. 0: one has to at the end of the step under way."""
        return (self._cap + self.block - count).min()

    def note_left(self, position: int, left: int) -> None:
        """Note the value of `left` in the step of the token at `position`."""
        self._known = position, left

    def is_due(self, position: int) -> bool:
        """Whether a head may have to evict at the end of the step after which `position` tokens are
        counted."""
        if self.block == 1:
            return True
        if not self.drifts:
            return position % self.block in self._phases
        at, left = self._known
        # A head grows by one row a step, or not at all.
        return position <= at or left <= position - 1 - at


def leaving(scores: Tensor, pos: Tensor, counts: Tensor) -> Tensor:
    """bool [F, N]: each head's counts [F] rows with the lowest scores, of equal scores the oldest;
    all that may leave, if they are fewer. scores float32 [F, N]: infinite if a row may not."""
    young = pos.argsort(dim=1, stable=True)
    ranked = scores.gather(1, young).argsort(dim=1, stable=True)
    order = young.gather(1, ranked)
    places = torch.arange(pos.shape[1], device=pos.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, places)
    return (rank < counts[:, None]) & (scores < torch.inf)


def close_gaps(
    columns: Collection[Tensor],
    index: Tensor,
    gone: Tensor,
    count: Tensor,
    newest: Tensor,
    many: int,
) -> None:
    """Move each head's last rows into the gaps of the rows that are `gone` bool [F, N], in every
    column [R, ...], so that a head's rows stay side by side. At most `many` rows of a head move.

    index int64 [F, N]: the heads' rows. count int64 [F]: how many of them are real. newest int64
    [F]: a row of each head that never leaves.
    """
    place = torch.arange(index.shape[1], device=index.device)
    inside = place < count[:, None]
    end = count[:, None] - gone.sum(1, keepdim=True)
    gaps = gone & (place < end)
    tails = inside & ~gone & (place >= end)
    valid = place[:many] < gaps.sum(1, keepdim=True)
    still = newest[:, None]  # padding of the moves: this row is copied onto itself
    order = (~gaps).to(torch.int8).argsort(dim=1, stable=True)[:, :many]
    into = torch.where(valid, index.gather(1, order), still).flatten()
    order = (~tails).to(torch.int8).argsort(dim=1, stable=True)[:, :many]
    moved = torch.where(valid, index.gather(1, order), still).flatten()
    for column in columns:
        column.index_copy_(0, into, column[moved])
