"""Decides which rows leave an arena while an answer is written, by the scores of its step
policy.

A policy that evicts one row at a time leaves a free slot for the next row. One that evicts several
at once (`StepPolicy.block`) leaves gaps, which the head's last rows fill.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minikv import kernels
from minikv.cache.arena import Arena
from minikv.cache.rules import unlearnt
from minikv.cache.stats import Shape
from minikv.kernels.decode.plain import in_use
from minikv.kernels.dispatch import Kernels
from minikv.policies.base import StepPolicy, StepView
from minikv.policies.moments import Rotation, unrotated

_ENDLESS = 1 << 40  # above every position, and the window of a layer that sees all rows
_MULTIPLE = 256  # a graph's width is a multiple, so that it survives small changes of caps
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


class Eviction:
    """Decides for each head where its new row goes, and which row leaves.

    count int64 [L, H]: rows in use, the new one included; slot int64 [L, H]: the new row, an index
    into the columns; position int64 []: tokens counted; window int64 [L]: how many rows each
    layer's queries see; oldest_seen [L]: the oldest of these; width: no head has more rows. pinned,
    leaves_last, captured: see `DecodeStep.open`; shown int32 [R]: with leaves_last, positions as
    the policy sees them. scratch: the step's logits float32 [L, H, G, width] and their log-sum-exps
    [L, H, G], if the policy reads them. quota: what `StepPolicy.quota` returns. learnt float32
    [L, H, n] and queries float32 [L, H, G, D]: for a policy that learns, what it learnt and the
    step's queries; else None. due: whether a head may have to evict at the end of the step.
    """

    arena: Arena
    _full: Tensor  # bool [L, H]: heads in which a row must leave before the new one has room

    def __init__(
        self, shape: Shape, device: torch.device, ops: Kernels, rotary: Rotation | None = None
    ) -> None:
        self.shape, self.device, self.ops, self.rotary = shape, device, ops, rotary
        with torch.inference_mode(False):  # written inside and outside of a forward
            sides = (shape.layers, shape.kv_heads)
            self.count = torch.zeros(sides, dtype=torch.int64, device=device)
            self.slot = torch.zeros_like(self.count)
            self.position = torch.zeros((), dtype=torch.int64, device=device)
            windows = [_ENDLESS if w is None else w for w in shape.windows]
            self.window = torch.tensor(windows, dtype=torch.int64, device=device)
            self.oldest_seen = torch.zeros_like(self.window)
        self._slides = any(w is not None for w in shape.windows)
        self.policy: StepPolicy | None = None
        self.width = self.pinned = self._due_from = 0
        self.captured, self.due = False, True
        self.scratch: tuple[Tensor, ...] = ()
        self.leaves_last: Tensor | None = None
        self.shown: Tensor | None = None
        self.quota: Tensor | None = None
        self.learnt: Tensor | None = None
        self.queries: Tensor | None = None
        self._given: Tensor | None = None  # gets what is learnt in steps
        self._kept: Heads | None = None  # the heads of all layers, while none grows

    # -- an answer begins and ends ------------------------------------------------------------

    def open(
        self,
        arena: Arena,
        policy: StepPolicy | None,
        position: int,
        pinned: int,
        leaves_last: Tensor | None,
        learnt: Tensor | None = None,
        *,
        captured: bool,
    ) -> None:
        """See `DecodeStep.open`."""
        self.arena, self.policy, self.pinned, self.captured = arena, policy, pinned, captured
        with torch.inference_mode(False):
            self._make_scratch(arena, policy)
            # A graph contains addresses, so the tensors that it reads must not move.
            shown = None if leaves_last is None else torch.zeros_like(arena.columns["pos"])
            self.leaves_last = _in_place(self.leaves_last, leaves_last)
            self.shown = _in_place(self.shown, shown)
            self.quota = _in_place(self.quota, None if policy is None else policy.quota(arena.cap))
            self._open_learning(policy, learnt)
        self.position.fill_(position)
        self.due, self._due_from, self._kept = True, position, None
        # A new row goes to its head's free slot, or after its last row if there is none.
        free = arena.free_slot
        grows = free < 0
        self.slot.copy_(torch.where(grows, arena.start + arena.length, free))
        if policy is not None and policy.evict_first:
            grows = grows & (arena.length < arena.cap)
        self.count.copy_(arena.length + grows)
        self._find_oldest()

    def _open_learning(self, policy: StepPolicy | None, learnt: Tensor | None) -> None:
        made = unlearnt(policy, self.shape, self.device)
        self._given = learnt if made is not None else None
        self.learnt = _in_place(self.learnt, made if self._given is None else self._given.clone())
        if made is None:
            self.queries = None
            return
        sides = (*self.count.shape, self.shape.heads // self.shape.kv_heads, self.shape.head_dim)
        if self.queries is None:
            self.queries = torch.zeros(sides, device=self.device)

    def _make_scratch(self, arena: Arena, policy: StepPolicy | None) -> None:
        """Choose the width, and allocate the logits of all heads if the policy reads them."""
        reads = policy is not None and not policy.evict_first
        assert policy is None or reads or policy.block == 1, "one row at a time before attention"
        most = arena.capacity if policy is None else arena.cap + (policy.block if reads else 0)
        multiple = _MULTIPLE if self.captured else 16
        width = -(-int(most.max()) // multiple) * multiple
        if not (self.captured and width <= self.width <= 4 * width):
            self.width = width
        sides = (*self.count.shape, self.shape.heads // self.shape.kv_heads)
        if not reads:
            self.scratch = ()
        elif not self.scratch or self.scratch[0].shape != (*sides, self.width):
            exact = torch.float32  # even if torch's default is another
            sizes = (*sides, self.width), sides
            self.scratch = tuple(torch.empty(n, dtype=exact, device=self.device) for n in sizes)

    def close(self) -> None:
        """Release the arena and, unless a graph needs it, the memory of steps."""
        vars(self).pop("arena", None)
        self._kept = None
        if self._given is not None and self.learnt is not None:
            with torch.inference_mode():
                self._given.copy_(self.learnt)
        self._given = None
        if not self.captured:
            self.scratch, self.leaves_last, self.shown, self.quota = (), None, None, None
            self.learnt = self.queries = None

    @property
    def held(self) -> list[Tensor]:
        """What `open` allocated, at addresses that stay while steps are captured."""
        found = *self.scratch, self.leaves_last, self.shown, self.quota, self.learnt, self.queries
        return [one for one in found if one is not None]

    @property
    def nbytes(self) -> int:
        """Bytes held in addition to the arena."""
        rows = self._kept
        used = () if rows is None else (rows.length, rows.index, rows.live)
        return sum(one.nbytes for one in (*self.held, *used))

    @property
    def readable(self) -> bool:
        """Values may be read without waiting for a device."""
        return not self.captured and self.device.type == "cpu"

    def is_due(self, position: int) -> bool:
        """Whether a head has to evict at the end of the step under way, after which `position`
        tokens are counted. Always, if heads evict one row at a time.

        A head grows by at most one row per step. So this waits for the device only when the head
        with the most rows may be full again.
        """
        block = 1 if self.policy is None else self.policy.block
        if block == 1 or position < self._due_from:
            return block == 1
        left = (self.arena.cap + block - self.count).flatten().tolist()
        self._due_from = position + min(steps if steps > 0 else block for steps in left)
        return bool(min(left) <= 0)

    # -- a step -------------------------------------------------------------------------------

    def before_attention(self) -> None:
        """Before the first layer: a policy that evicts first, without needing the query, chooses
        the row that leaves each full head. The new row overwrites it."""
        arena, policy = self.arena, self.policy
        if policy is None or not policy.evict_first:
            return
        self._full = (arena.free_slot < 0) & (arena.length >= arena.cap)
        if self._none(self._full):
            return
        self._show(policy, arena.length)
        if not policy.needs_query:
            for heads in self._parts(arena.length):
                self._evict(policy, heads, self._full, self.position)
            torch.where(arena.free_slot >= 0, arena.free_slot, self.slot, out=self.slot)

    def by_query(self, policy: StepPolicy, layer: int, query: Tensor, key: Tensor) -> None:
        """Like `before_attention`, in one layer, for a policy that needs the query. query [H, G,
        D]; key [H, D]: of the new row."""
        if self._none(self._full[layer]):
            return
        heads = self._heads_of(slice(layer, layer + 1), self.arena.length)
        self._evict(policy, heads, self._full, self.position, probes=(query, key[:, None]))
        free, slot = self.arena.free_slot[layer], self.slot[layer]
        torch.where(free >= 0, free, slot, out=slot)

    def note_keys(self, policy: StepPolicy, layer: int, key: Tensor) -> None:
        """Write the columns that depend on a row's key, for the new rows of the layers from `layer`
        on. key [l, H, 1, D]."""
        slot = self.slot[layer : layer + len(key)].flatten()
        for name, values in policy.of_key(layer, key).items():
            self.arena.columns[name].index_copy_(0, slot, values.flatten())

    def end(self) -> None:
        """The step's token counts: update the policy's columns, choose the row that leaves each
        head over its cap (`Arena.free_slot`; -1 for the others), and where the next rows go."""
        arena, policy = self.arena, self.policy
        if policy is not None and self.learnt is not None:
            self._learn(policy, self.learnt)
        if policy is not None and policy.has_key_columns and not policy.needs_query:
            self.note_keys(policy, 0, arena.read(self.ops, "k", self.slot)[:, :, None])
        if policy is None or policy.evict_first:
            arena.free_slot.fill_(-1)
        else:
            self._after_attention(policy)
        if self._slides:
            self._free_unseen()
        tables = arena.start, arena.length, arena.cap, arena.free_slot
        heads = kernels.Advancing(*tables, self.position, self.count, self.slot)
        self.ops.advance(heads, before=policy is not None and policy.evict_first)
        self._find_oldest()

    def _learn(self, policy: StepPolicy, learnt: Tensor) -> None:
        """Have the policy learn from the step's queries in all layers."""
        assert self.queries is not None
        assert self.rotary is not None, "the network's rotary frequencies are not known"
        inverse = torch.stack([one.inverse for one in self.rotary.layers])
        angle = (self.position * inverse.to(torch.float64))[:, None, None, None]
        scale = self.rotary.query_scale(self.position, 1)
        queries = unrotated(self.queries[:, :, :, None], angle, scale)  # [L, H, G, 1, D]
        policy.learn(learnt.flatten(0, 1), queries.flatten(0, 1))

    def _after_attention(self, policy: StepPolicy) -> None:
        arena = self.arena
        if self.due:
            self._show(policy, self.count)
        kernel = self.ops.evict.get(policy.name)
        if kernel is not None:
            columns = [arena.columns[name] for name in policy.columns]
            rows = self.for_kernel(policy, self.count)
            kernel(*self.scratch, rows, arena.free_slot, columns, self.quota)
            return
        over = self.count > arena.cap + (policy.block - 1)
        evicts = self.due and not self._none(over)
        arena.free_slot.fill_(-1)
        for heads in self._parts(self.count):
            logits, lse = (t[heads.layers].flatten(0, 1) for t in self.scratch)
            p = policy.attention(logits, lse, heads.live)
            self._update(policy, heads, p)
            if evicts:
                self._evict(policy, heads, over, self.position + 1, attention=p)

    def _free_unseen(self) -> None:
        """In layers with a sliding window: the oldest row of a head that the next token does not
        see leaves before all others."""
        arena = self.arena
        for heads in self._parts(self.count):
            at = arena.columns["pos"][heads.index].to(torch.int64)
            oldest, place = at.masked_fill(~heads.live, _ENDLESS).min(1)
            window = self.window[heads.layers, None].expand(-1, arena.heads).flatten()
            free, row = heads.of(arena.free_slot), heads.of(arena.start) + place
            free.copy_(torch.where(oldest <= self.position + 1 - window, row, free))

    def _find_oldest(self) -> None:
        if self._slides:
            torch.sub(self.position, self.window, out=self.oldest_seen).add_(1)

    def _none(self, heads: Tensor) -> bool:
        """Whether none of these is set, if that is known without waiting for the device."""
        return self.readable and not bool(heads.any())

    def _update(self, policy: StepPolicy, heads: Heads, p: Tensor) -> None:
        """Let the policy add a step's attention [F, N] to its columns."""
        if not policy.columns:
            return
        arena, part = self.arena, heads.layers
        first, end = arena.region[part.start], arena.region[part.stop]
        # Padding is written to an extra row after the last one.
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
        hidden = ~heads.live | (pos < self.pinned) | ~over[:, None]  # other heads lose nothing
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
            lambda some: arena.read(self.ops, "v", index[some]),
            self.readable,
            int(position) + 1 if self.readable else self.shape.max_context + 1,
            None if self.learnt is None else self.learnt[heads.layers].flatten(0, 1),
            self.rotary,
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
        """Update the positions that the policy sees. Rows that should leave last are hidden as long
        as enough others remain. length int64 [L, H]: the rows in use."""
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

    def for_kernel(self, policy: StepPolicy, length: Tensor) -> kernels.Rows:
        """The argument of a kernel for all heads. length int64 [L, H]: the rows in use."""
        arena = self.arena
        tables = arena.start, length, arena.cap, self.positions, self.position
        return kernels.Rows(*tables, policy.sinks, policy.recent, self.pinned)

    def _parts(self, length: Tensor) -> Iterator[Heads]:
        """The heads of all layers, or of some at a time, so that about `_AT_ONCE` rows are computed
        at once. length int64 [L, H]: the rows in use."""
        layers = self.shape.layers
        many = max(1, _AT_ONCE // max(1, self.width * self.arena.heads))
        for lo in range(0, layers, many):
            yield self._heads_of(slice(lo, min(lo + many, layers)), length)

    def _heads_of(self, part: slice, length: Tensor) -> Heads:
        """The heads of some layers. For all layers, the result is cached while no head grows."""
        whole = self.readable and part.stop - part.start == len(length)
        if whole and self._kept is not None and torch.equal(self._kept.length, length):
            return self._kept
        start, count = (table[part].flatten() for table in (self.arena.start, length))
        made = Heads(part, length, *in_use(start, count, self.width, self.arena.rows))
        if whole:
            self._kept = replace(made, length=length.clone())
        return made


def leaving(scores: Tensor, pos: Tensor, counts: Tensor) -> Tensor:
    """bool [F, N]: the counts [F] rows of each head with the lowest scores (of equal scores, the
    oldest), or all rows that may leave if there are fewer. scores float32 [F, N]: infinite for a
    row that may not leave. NaN counts as 0, so that as many leave whatever a score is."""
    scores = scores.nan_to_num(0.0, torch.inf, -torch.inf)
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
    column [R, ...], so that a head's rows stay contiguous. At most `many` rows of a head move.

    index int64 [F, N]: the heads' rows. count int64 [F]: how many of them are real. newest int64
    [F]: a row of each head that never leaves.
    """
    place = torch.arange(index.shape[1], device=index.device)
    end = count[:, None] - gone.sum(1, keepdim=True)
    gaps = gone & (place < end)
    tails = (place < count[:, None]) & ~gone & (place >= end)
    valid = place[:many] < gaps.sum(1, keepdim=True)

    def first(which: Tensor) -> Tensor:
        """The first `many` of these rows. If there are fewer, the newest fills the list; it is
        copied onto itself."""
        order = (~which).to(torch.int8).argsort(dim=1, stable=True)[:, :many]
        return torch.where(valid, index.gather(1, order), newest[:, None]).flatten()

    into, moved = first(gaps), first(tails)
    for column in columns:
        column.index_copy_(0, into, column[moved])


def _in_place(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    """`new`, copied into the memory of `old` if they have the same shape."""
    if old is None or new is None or old.shape != new.shape:
        return new
    return old.copy_(new)
