"""Step policies that evict several rows of a head at once (`StepPolicy.block`): at which steps a
head can be full, and how the gaps are closed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import torch
from torch import Tensor

from minikv.cache.arena import Arena
from minikv.policies.base import StepPolicy


class Schedule:
    """At which steps of an answer a head may have to give up rows, known without asking the device,
    so that other steps need not compute who would.

    A head of a policy that evicts `block` rows at once does so every `block` steps. Where rows
    slide out of windows it grows more slowly: there it `drifts`, and the steps tell (`note_left`).
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
        """int64 []: of heads with so many rows [L, H], the new ones included, the steps until one
        has to give up rows, at least: 0 if one must at the end of the step under way."""
        return (self._cap + self.block - count).min()

    def note_left(self, position: int, left: int) -> None:
        """`left` was so much in the step of the token at `position`."""
        self._known = position, left

    def is_due(self, position: int) -> bool:
        """Whether a head may have to give up rows when the step ends after which so many tokens
        are counted."""
        if self.block == 1:
            return True
        if not self.drifts:
            return position % self.block in self._phases
        at, left = self._known
        # A head grows by one row a step, or not at all.
        return position <= at or left <= position - 1 - at


def close_gaps(
    columns: Collection[Tensor],
    index: Tensor,
    gone: Tensor,
    count: Tensor,
    newest: Tensor,
    many: int,
    undo: list[Callable[[], object]],
) -> None:
    """Move the rows behind those that stay into the gaps of those that are `gone` bool [F, N], at
    most `many` of a head, in every column [R, ...]: a head's rows stay side by side.

    index int64 [F, N]: the heads' rows; count int64 [F]: how many of them are real; newest [F]: a
    row of each head that never leaves. How to take the moves back is added to `undo`. Nothing is
    changed before all that is needed was allocated.
    """
    place = torch.arange(index.shape[1], device=index.device)
    inside = place < count[:, None]
    end = count[:, None] - gone.sum(1, keepdim=True)
    gaps = gone & (place < end)
    tails = inside & ~gone & (place >= end)
    valid = place[:many] < gaps.sum(1, keepdim=True)
    still = newest[:, None]  # a move that is not needed is its own
    order = (~gaps).to(torch.int8).argsort(dim=1, stable=True)[:, :many]
    into = torch.where(valid, index.gather(1, order), still).flatten()
    order = (~tails).to(torch.int8).argsort(dim=1, stable=True)[:, :many]
    moved = torch.where(valid, index.gather(1, order), still).flatten()
    for column, rows, old in [(column, column[moved], column[into]) for column in columns]:
        undo.append(partial(column.index_copy_, 0, into, old))
        column.index_copy_(0, into, rows)
