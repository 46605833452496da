"""Which rows leave the heads of an arena while an answer is written, by the scores of its step
policy.

A policy that evicts one row at a time leaves a free slot, which the next row takes. One that evicts
several at once (`StepPolicy.block`) leaves gaps, which the head's last rows fill.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from minikv import kernels
from minikv.cache.arena import Arena
from minikv.cache.stats import Shape
from minikv.kernels.decode.plain import in_use
from minikv.kernels.dispatch import Kernels
from minikv.policies.base import StepPolicy, StepView

_ENDLESS = 1 << 40  # above every position
_AT_ONCE = 1 << 20  # rows, with padding, whose statistics and scores are computed at once


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads [F] of some layers, of which length int64 [L, H] rows are in use. index int64 and
    live bool [F, N]: these rows, padded by repeating a head's last row, which is not live."""

    layers: slice
    length: Tensor
    index: Tensor
    live: Tensor

    def of(self, table: Tensor) -> Tensor:
        """[F]: their part of a table [L, H], as a view."""
        return table[self.layers].view(-1)


@dataclass(slots=True)
class Eviction:
    """The policy at work on an arena.

    window int64 [L]: how many rows each layer's queries see. count and slot int64 [L, H]: each
    head's rows in use with the new one, and where that is. width: no head has more rows.
    leaves_last bool [R]: rows that leave after all others; then shown int32 [R]: positions as the
    policy sees them. readable: values may be read without waiting for a device. kept: the heads of
    all layers, while none grows. full bool [L, H]: heads in which a row must leave before the new
    one has room.
    """

    arena: Arena
    policy: StepPolicy | None
    shape: Shape
    ops: Kernels
    window: Tensor
    count: Tensor
    slot: Tensor
    width: int
    pinned: int
    leaves_last: Tensor | None
    shown: Tensor | None
    readable: bool
    kept: Heads | None = None
    full: Tensor = field(init=False)

    def before_attention(self, position: Tensor) -> None:
        """Before the first layer: a policy that evicts first, but does not need the query for that,
        chooses the row that leaves each full head. The new row takes its place."""
        arena, policy = self.arena, self.policy
        if policy is None or not policy.evict_first:
            return
        self.full = (arena.free_slot < 0) & (arena.length >= arena.cap)
        if self.readable and not bool(self.full.any()):
            return
        self._show(policy, arena.length)
        if not policy.needs_query:
            for heads in self._parts(arena.length):
                self._evict(policy, heads, self.full, position)
            torch.where(arena.free_slot >= 0, arena.free_slot, self.slot, out=self.slot)

    def by_query(
        self, policy: StepPolicy, layer: int, position: Tensor, query: Tensor, key: Tensor
    ) -> None:
        """The same in one layer, under a policy that needs the query. query [H, G, D]; key [H, D]:
        of the new row."""
        if self.readable and not bool(self.full[layer].any()):
            return
        heads = self._heads_of(slice(layer, layer + 1), self.arena.length)
        self._evict(policy, heads, self.full, position, probes=(query, key[:, None]))
        free, slot = self.arena.free_slot[layer], self.slot[layer]
        torch.where(free >= 0, free, slot, out=slot)

    def after_attention(
        self, logits: Tensor, lse: Tensor, position: Tensor, quota: Tensor | None, due: bool
    ) -> None:
        """At the end of a step: update the policy's columns, and choose the row that leaves each
        head over its cap (`Arena.free_slot`; -1 for the other heads).

        logits [L, H, G, N] and lse [L, H, G]: of the step. position: of its token. quota: what
        `StepPolicy.quota` returned. due: a head may have to evict.
        """
        arena, policy = self.arena, self.policy
        if policy is None or policy.evict_first:
            arena.free_slot.fill_(-1)
            return
        if due:
            self._show(policy, self.count)
        kernel = self.ops.evict.get(policy.name)
        if kernel is not None:
            columns = [arena.columns[name] for name in policy.columns]
            rows = self.for_kernel(policy, self.count, position)
            kernel(logits, lse, rows, arena.free_slot, columns, quota)
            return
        over = self.count > arena.cap + (policy.block - 1)
        evicts = due and not (self.readable and not bool(over.any()))
        arena.free_slot.fill_(-1)
        for heads in self._parts(self.count):
            each = heads.layers
            p = policy.attention(logits[each].flatten(0, 1), lse[each].flatten(0, 1), heads.live)
            self._update(policy, heads, p)
            if evicts:
                self._evict(policy, heads, over, position + 1, attention=p)

    def free_unseen(self, position: Tensor) -> None:
        """In layers with a sliding window: the oldest row of a head that the next token does not
        see leaves before all others. position: of the step's token."""
        arena = self.arena
        for heads in self._parts(self.count):
            at = arena.columns["pos"][heads.index].to(torch.int64)
            oldest, place = at.masked_fill(~heads.live, _ENDLESS).min(1)
            window = self.window[heads.layers, None].expand(-1, arena.heads).flatten()
            free, row = heads.of(arena.free_slot), heads.of(arena.start) + place
            free.copy_(torch.where(oldest <= position + 1 - window, row, free))

    def _update(self, policy: StepPolicy, heads: Heads, p: Tensor) -> None:
        """Let the policy add a step's attention [F, N] to its columns."""
        if not policy.columns:
            return
        arena, part = self.arena, heads.layers
        first, end = arena.region[part.start], arena.region[part.stop]
        # Padding is written to an extra row behind the last one.
        place = torch.where(heads.live, heads.index - first, end - first).flatten()

        def by_row(values: Tensor) -> Tensor:
            return p.new_zeros(end - first + 1).scatter_(0, place, values.flatten())[:-1]

        def visible() -> Tensor:
            seen = torch.minimum(self.count[part], self.window[part, None]).flatten()
            return by_row(seen[:, None].expand_as(p).to(torch.float32))

        columns = {name: arena.columns[name][first:end] for name in policy.columns}
        policy.update(columns, by_row(p), visible)

    def _evict(
        self,
        policy: StepPolicy,
        heads: Heads,
        over: Tensor,
        position: Tensor,
        *,
        attention: Tensor | None = None,
        probes: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> None:
        """In the heads that are `over` bool [L, H], the rows with the lowest scores leave. position
        int64 []: tokens counted. attention and probes (query and key): see `StepView`."""
        arena, index = self.arena, heads.index
        over, flat = heads.of(over), index.flatten()

        def column(name: str) -> Tensor:
            return arena.columns[name].index_select(0, flat).view(index.shape)

        pos = self.positions.index_select(0, flat).view(index.shape).to(torch.int64)
        hidden = ~heads.live | (pos < self.pinned) | ~over[:, None]  # others give up nothing
        pos = pos.masked_fill(hidden, -1)
        view = StepView(
            position,
            pos,
            policy.free(pos, position, policy.block, readable=self.readable),
            heads.of(arena.cap),
            policy.block,
            heads.layers.start,
            arena.heads,
            column,
            attention,
            *probes,
            lambda some: arena.read(self.ops, "k", index[some]),
            self.readable,
            int(position) + 1 if self.readable else self.shape.max_context + 1,
        )
        scores = policy.worth(view)
        if policy.block == 1:
            self.ops.lowest(scores, pos, heads.of(arena.start), over, heads.of(arena.free_slot))
            return
        gone = leaving(scores, pos, over * policy.block)
        count, newest = heads.of(self.count), heads.of(self.slot)
        close_gaps(self.written.values(), index, gone, count, newest, policy.block)
        count -= gone.sum(1)

    def _show(self, policy: StepPolicy, length: Tensor) -> None:
        """Update the positions that the policy sees: rows that leave last are hidden, while there
        are enough others. length int64 [L, H]: the rows in use."""
        if self.leaves_last is None or self.shown is None:
            return
        least = policy.sinks + policy.recent + policy.block
        for heads in self._parts(length):
            at = self.arena.columns["pos"][heads.index]
            may = at >= self.pinned
            others = may & ~self.leaves_last[heads.index]
            enough = (others & heads.live).sum(1, keepdim=True) >= least
            shown = at.masked_fill(~torch.where(enough, others, may), -1)
            # Padding repeats a head's last row, and so does its value.
            self.shown.index_copy_(0, heads.index.flatten(), shown.flatten())

    # -- rows ---------------------------------------------------------------------------------

    @property
    def positions(self) -> Tensor:
        """int32 [R]: the position of each row, as the policy sees it."""
        return self.arena.columns["pos"] if self.shown is None else self.shown

    @property
    def written(self) -> dict[str, Tensor]:
        """Every column that a new row is written to."""
        columns = self.arena.columns
        return columns if self.leaves_last is None else columns | {"leaves_last": self.leaves_last}

    @property
    def blank(self) -> list[Tensor]:
        """The columns in which a new row starts as 0."""
        extra = [self.arena.columns[name] for name in self.arena.extra]
        return extra if self.leaves_last is None else [*extra, self.leaves_last]

    def for_kernel(self, policy: StepPolicy, length: Tensor, position: Tensor) -> kernels.Rows:
        """The argument of a kernel for all heads. length int64 [L, H]: the rows in use."""
        arena = self.arena
        tables = arena.start, length, arena.cap, self.positions, position
        return kernels.Rows(*tables, policy.sinks, policy.recent, self.pinned)

    def _parts(self, length: Tensor) -> Iterator[Heads]:
        """The heads of all layers, or of some at a time, so that about `_AT_ONCE` rows are computed
        at once. length int64 [L, H]: the rows in use."""
        layers = self.shape.layers
        many = max(1, _AT_ONCE // max(1, self.width * self.arena.heads))
        for lo in range(0, layers, many):
            yield self._heads_of(slice(lo, min(lo + many, layers)), length)

    def _heads_of(self, part: slice, length: Tensor) -> Heads:
        """The heads of some layers. If these are all, the result is kept while no head grows."""
        whole = self.readable and part.stop - part.start == len(length)
        if whole and self.kept is not None and torch.equal(self.kept.length, length):
            return self.kept
        start, count = (table[part].flatten() for table in (self.arena.start, length))
        made = Heads(part, length, *in_use(start, count, self.width, self.arena.rows))
        if whole:
            self.kept = replace(made, length=length.clone())
        return made


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
    end = count[:, None] - gone.sum(1, keepdim=True)
    gaps = gone & (place < end)
    tails = (place < count[:, None]) & ~gone & (place >= end)
    valid = place[:many] < gaps.sum(1, keepdim=True)

    def first(which: Tensor) -> Tensor:
        """The first `many` of these rows; where there are fewer, the newest, which then is copied
        onto itself."""
        order = (~which).to(torch.int8).argsort(dim=1, stable=True)[:, :many]
        return torch.where(valid, index.gather(1, order), newest[:, None]).flatten()

    into, moved = first(gaps), first(tails)
    for column in columns:
        column.index_copy_(0, into, column[moved])
