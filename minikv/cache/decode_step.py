"""One decode step: every head gets a row for the new token, the token's query attends, and a head
that is over its cap gives up a row.

    begin      a policy that evicts before attention chooses its victims
    append     write the new row, in every column                       (layer by layer)
    attention  the query attends to the rows of its head                (layer by layer)
    update     add this step's attention to the policy's columns
    evict      choose the row that leaves each head over its cap
    place      choose where in the arena the next token's row goes

`attend_unrotated`, or `attend` if queries and keys are already rotated, does `append` and
`attention`; `Kernels.layers` may do both in all layers (`step_arena`). `end` does the rest. A
policy that needs the query to choose its victims chooses them between `begin` and `append`.

The row of a token belongs to no head before `end`. So under a policy that evicts after attention, a
step that is not ended leaves nothing behind, and may be begun before its token is known to belong
to the answer. A step that fails may have changed rows: its cache must be dropped.

No shape depends on a value on the device, and nothing is read from it while steps are captured.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor

from minikv import kernels
from minikv.cache.arena import Arena
from minikv.cache.block_eviction import Schedule, close_gaps, leaving
from minikv.cache.stats import Shape
from minikv.kernels.dispatch import Kernels
from minikv.policies.base import StepPolicy, StepView

_ENDLESS = 1 << 40  # the window of a layer without sliding-window attention
_AT_ONCE = 1 << 20  # rows, with padding, whose statistics and scores are computed at once
_MULTIPLE = 256  # a graph's width is a multiple, so that small changes of caps do not change it
_OWN = ("start", "length", "cap", "free_slot")


class DecodeStep:
    """`Attend` for one token at a time over an arena. Call `open`; for each token, the network's
    forward and then `end`; and finally `close`.

    count int64 [L, H]: rows in use, the new one included; slot [L, H]: the new row, an index into
    the columns; position int64 []: tokens counted; due: whether a head may have to evict at the end
    of the step under way (see `Schedule`).
    """

    def __init__(self, shape: Shape, device: torch.device, ops: Kernels | None = None) -> None:
        self.shape, self.device, self.ops = shape, device, ops or Kernels()
        sides = (shape.layers, shape.kv_heads)
        with torch.inference_mode(False):  # written inside and outside of a forward
            self.count = torch.zeros(sides, dtype=torch.int64, device=device)
            self.slot = torch.zeros_like(self.count)
            # Scratch of GPU kernels, used by one layer after the other.
            self.arrived = torch.zeros(shape.kv_heads, dtype=torch.int32, device=device)
            self.position = torch.zeros((), dtype=torch.int64, device=device)
            windows = [_ENDLESS if w is None else w for w in shape.windows]
            self.window = torch.tensor(windows, dtype=torch.int64, device=device)
            self.oldest_seen = torch.zeros_like(self.window)  # the oldest that a query sees
            self._layer = torch.arange(shape.layers, device=device).repeat_interleave(sides[1])
            self._head = torch.arange(shape.kv_heads, device=device).repeat(sides[0])
            self._nothing = torch.empty(0, device=device)
        self._slides = any(w is not None for w in shape.windows)
        self._arena: Arena | None = None
        self.policy: StepPolicy | None = None
        self.pinned = self.width = 0
        self.captured = False
        self.quota: Tensor | None = None
        self.logits = self.lse = self._nothing
        self.leaves_last: Tensor | None = None
        self._shown: Tensor | None = None  # with leaves_last: positions as the policy sees them
        self._layers: list[tuple[Tensor, ...]] = []  # views by layer, made once to save time
        self._used: tuple[Tensor, Tensor, Tensor] | None = None  # see `_rows`
        self._step_arena: object | None = None  # see `step_arena`
        self.schedule: Schedule
        self.due = True
        self.key: tuple[object, ...] = ()

    # -- an answer begins and ends ------------------------------------------------------------

    def open(
        self,
        arena: Arena,
        policy: StepPolicy | None,
        position: int,
        *,
        pinned: int = 0,
        leaves_last: Tensor | None = None,
        captured: bool = False,
    ) -> None:
        """Get ready for steps over `arena`: every head has room for a row, none is over its cap.

        position: tokens counted so far; positions below `pinned` never leave; `leaves_last` bool
        [R]: rows that leave after all others. captured: no step may read a value from the device,
        and addresses stay where they are. Allocates the memory that steps need. Raises what torch
        raises, and then this stays closed. `key` changes whenever something changes that a captured
        step holds fixed.
        """
        reads = policy is not None and not policy.evict_first
        assert policy is None or reads or policy.block == 1, "one row at a time before attention"
        most = arena.capacity if policy is None else arena.cap + (policy.block if reads else 0)
        multiple = _MULTIPLE if captured else 16
        width = -(-int(most.max()) // multiple) * multiple
        self.width = self.width if captured and width <= self.width <= 4 * width else width
        layers, heads = arena.length.shape
        sides = (layers, heads, self.shape.heads // heads)
        exact = torch.float32  # whatever torch's default is
        with torch.inference_mode(False):
            if not reads:
                self.logits = self.lse = self._nothing
            elif self.logits.shape != (*sides, self.width):
                self.logits = torch.empty((*sides, self.width), dtype=exact, device=self.device)
                self.lse = torch.empty(sides, dtype=exact, device=self.device)
            quota = None if policy is None else policy.quota(arena.cap)
            # A graph holds addresses, so what it reads must stay at the same address.
            self.leaves_last = _in_place(self.leaves_last, leaves_last)
            shown = None if leaves_last is None else torch.zeros_like(arena.columns["pos"])
            self._shown = _in_place(self._shown, shown)
            self.quota = _in_place(self.quota, quota)
        self.policy, self.captured, self.pinned = policy, captured, pinned
        self.position.fill_(position)
        self.arrived.zero_()  # a launch that failed may have left counts
        self._used, self._step_arena, self.due = None, None, True
        self.schedule = Schedule(policy, arena, position, slides=self._slides)
        whole = (arena.start, self.count, self.slot, self.oldest_seen)
        scratch = (self.logits, self.lse) if reads else ()
        self._layers = list(zip(*(t.unbind() for t in (*whole, *scratch)), strict=True))
        self._place(arena)
        own = (self.count, self.slot, self.position, self.oldest_seen, self.window, self.arrived)
        work = (self.logits, self.lse, self.leaves_last, self._shown, self.quota)
        fixed = (*arena.columns.values(), *(getattr(arena, name) for name in _OWN), *own, *work)
        addresses = (t.data_ptr() for t in fixed if t is not None)
        self.key = policy, pinned, self.width, *arena.region, *addresses
        self._arena = arena  # last, so that an incomplete step is never open

    @property
    def is_open(self) -> bool:
        """Between `open` and `close`."""
        return self._arena is not None

    @property
    def arena(self) -> Arena:
        """Only between `open` and `close`."""
        assert self._arena is not None
        return self._arena

    @property
    def readable(self) -> bool:
        """Values may be read without waiting for a device."""
        return not self.captured and self.device.type == "cpu"

    @property
    def left(self) -> Tensor:
        """`Schedule.left` for the step under way."""
        return self.schedule.left(self.count)

    def close(self) -> None:
        """End the steps: release the arena and, unless a graph needs it, the memory of steps."""
        self._arena, self._used, self._step_arena = None, None, None
        if not self.captured:
            self.logits = self.lse = self._nothing
            self.leaves_last = self._shown = None
            self._layers = []

    @property
    def nbytes(self) -> int:
        """Bytes held beside the arena."""
        held = (self.logits, self.lse, self.leaves_last, self._shown, *(self._used or ()))
        return sum(t.nbytes for t in held if t is not None)

    # -- a step -------------------------------------------------------------------------------

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend`; one token. Writes the new row of each head, then attends."""
        assert len(q) == 1, "a prompt must be announced with begin()"
        if layer == 0:
            self.begin()
        query = q[0].view(self.shape.kv_heads, -1, self.shape.head_dim)
        self._append(layer, query, k[0], v[0])
        return self._attention(layer, query)

    def attend_unrotated(self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`attend` for one token whose queries and keys are not rotated yet. qkv: queries, keys and
        values [H * G + 2 * H, D]. cos and sin [1, 1, D]: as `Rotary.table` makes them."""
        heads, policy = self.shape.kv_heads, self.policy
        if layer == 0:
            self.begin()
        if policy is not None and policy.needs_query:
            query = qkv[: -2 * heads].view(heads, -1, self.shape.head_dim)
            key, value, rotated = qkv[-2 * heads : -heads], qkv[-heads:], torch.empty_like(query)
            if not self._append_evict(policy, layer, query, key, value, (cos, sin, rotated)):
                both = self.ops.rotate(qkv[None, :-heads], cos, sin)[0]
                rotated = both[:-heads].view_as(query)
                self._append(layer, rotated, both[-heads:], value)
            return self._attention(layer, rotated)
        row, scales = self._new_row(layer)
        query, _ = self.ops.rotate_append(qkv, cos, sin, *row, self._blank(), *scales)
        return self._attention(layer, query)

    def step_arena(self) -> object | None:
        """In place of `attend` and `attend_unrotated` in every layer: the arena in the form that
        `ops.layers` takes. None if there is no such kernel, or if the policy does something in each
        layer that this kernel cannot do; then nothing was done."""
        policy, arena, ops = self.policy, self.arena, self.ops
        if ops.step_arena is None:
            return None
        if self._step_arena is None:
            rule = policy if policy is not None and policy.needs_query else None
            if rule is not None and rule.name not in ops.append_evict:
                return None
            scratch = (self.logits, self.lse) if self.logits.numel() else (None, None)
            self._step_arena = ops.step_arena(
                arena.columns,
                self._blank(),
                self.position,
                arena.start,
                self.count,
                self.slot,
                self.shape.windows,
                self.oldest_seen,
                *scratch,
                rule,
                self._for_kernel(rule, arena.length) if rule is not None else None,
                arena.free_slot,
            )
        if self._step_arena is not None:
            self.begin()
        return self._step_arena

    def begin(self) -> None:
        """Before the first layer: a policy that evicts before attention, but does not need the
        query for that, chooses the row that leaves each full head. The new row takes its place."""
        arena, policy = self.arena, self.policy
        if policy is None or not policy.evict_first:
            return
        full = self._full
        if self.readable and not bool(full.any()):
            return
        self._show(policy, arena.length)
        if not policy.needs_query:
            for part in self._parts():
                self._evict(policy, part, full, arena.length, self.position)
            torch.where(arena.free_slot >= 0, arena.free_slot, self.slot, out=self.slot)

    def end(self) -> None:
        """The step's token counts: update the policy's columns, choose the rows that leave, and
        where the rows of the next token go."""
        arena, policy = self.arena, self.policy
        if self.readable and policy is not None and policy.block > 1:
            self.due = int(self.left) <= 0
        if policy is not None and policy.has_key_columns and not policy.needs_query:
            self._note_keys(policy, 0, arena.read(self.ops, "k", self.slot)[:, :, None])
        if policy is None or policy.evict_first:
            arena.free_slot.fill_(-1)
        else:
            self._update_and_evict(policy)
        if self._slides:
            self._free_unseen()
        self.ops.advance(
            arena.start,
            arena.length,
            arena.cap,
            arena.free_slot,
            self.position,
            self.count,
            self.slot,
            before=policy is not None and policy.evict_first,
        )
        self._find_oldest()

    def advance(self, tokens: int) -> None:
        """See `Attend`. The step counts only with `end`."""
        assert tokens == 1

    def _place(self, arena: Arena) -> None:
        """Choose where each head's new row goes: to its free slot, else behind its last row."""
        free, policy = arena.free_slot, self.policy
        grows = free < 0
        self.slot.copy_(torch.where(grows, arena.start + arena.length, free))
        if policy is not None and policy.evict_first:
            grows = grows & (arena.length < arena.cap)
        self.count.copy_(arena.length + grows)
        self._find_oldest()

    def _find_oldest(self) -> None:
        if self._slides:
            torch.sub(self.position, self.window, out=self.oldest_seen).add_(1)

    # -- the new row, and attention -----------------------------------------------------------

    def _append(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Write the new row of each head in every column. query [H, G, D]; key, value [H, D]."""
        policy = self.policy
        if policy is not None and policy.needs_query:
            if self._append_evict(policy, layer, query, key, value):
                return
            arena, full = self.arena, self._full
            if not self.readable or bool(full[layer].any()):
                seen = query, key[:, None]
                self._evict(policy, layer, full, arena.length, self.position, probes=seen)
                free, slot = arena.free_slot[layer], self.slot[layer]
                torch.where(free >= 0, free, slot, out=slot)
        row, scales = self._new_row(layer)
        self.ops.append(key, value, *row, self._blank(), *scales)
        if policy is not None and policy.needs_query:
            self._note_keys(policy, layer, key[None, :, None])

    def _append_evict(
        self,
        policy: StepPolicy,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        turn: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> bool:
        """Choose the victims by the query and write the new rows, with the policy's kernel. False
        if it has none that can."""
        kernel = self.ops.append_evict.get(policy.name)
        if kernel is None:
            return False
        arena = self.arena
        new = kernels.NewRow(
            layer,
            query,
            key,
            value,
            arena.start[layer],
            arena.length[layer],
            arena.cap[layer],
            arena.free_slot[layer],
            self.position,
            self._written,
            self.width,
            self.pinned,
            self._positions,
            turn,
            self.arrived,
        )
        return kernel(policy, new)

    def _new_row(
        self, layer: int
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor | None, Tensor | None]]:
        """For `ops.append` and `ops.rotate_append`: slot, position, k, v and pos; and the scales of
        int8 rows."""
        columns = self.arena.columns
        row = self._layers[layer][2], self.position, columns["k"], columns["v"], columns["pos"]
        return row, (columns.get("k_scale"), columns.get("v_scale"))

    def _blank(self) -> list[Tensor]:
        """The columns in which a new row starts as 0."""
        extra = [self.arena.columns[name] for name in self.arena.extra]
        return extra if self.leaves_last is None else [*extra, self.leaves_last]

    @property
    def _written(self) -> dict[str, Tensor]:
        """Every column that a new row is written to."""
        columns = self.arena.columns
        return columns if self.leaves_last is None else columns | {"leaves_last": self.leaves_last}

    def _attention(self, layer: int, query: Tensor) -> Tensor:
        """Attention of a layer's query [H, G, D] to the rows of each head: mixed values [1, H * G,
        D]."""
        columns = self.arena.columns
        start, count, _, oldest, *scratch = self._layers[layer]
        window = self.shape.windows[layer]
        mixed, _ = self.ops.ragged_attention(
            query,
            columns["k"],
            columns["v"],
            start,
            count,
            width=self.width,
            pos=None if window is None else columns["pos"],
            oldest=None if window is None else oldest,
            logits=scratch[0] if scratch else None,
            lse=scratch[1] if scratch else None,
            k_scale=columns.get("k_scale"),
            v_scale=columns.get("v_scale"),
            arrived=self.arrived,
        )
        return mixed.reshape(1, self.shape.heads, -1)

    # -- the policy ---------------------------------------------------------------------------

    @property
    def _full(self) -> Tensor:
        """bool [L, H]: heads in which a row must leave before the new one has room."""
        arena = self.arena
        return (arena.free_slot < 0) & (arena.length >= arena.cap)

    def _note_keys(self, policy: StepPolicy, layer: int, key: Tensor) -> None:
        """Write the columns that depend on a row's key, for the new rows of the layers from `layer`
        on. key [l, H, 1, D]."""
        slot = self.slot[layer : layer + len(key)].flatten()
        for name, values in policy.of_key(layer, key).items():
            self.arena.columns[name].index_copy_(0, slot, values.flatten())

    def _update_and_evict(self, policy: StepPolicy) -> None:
        """After attention: update the policy's columns, and choose the row that leaves each head
        over its cap (`arena.free_slot`; -1 for the other heads)."""
        arena = self.arena
        if self.due:
            self._show(policy, self.count)
        kernel = self.ops.evict.get(policy.name)
        if kernel is not None:
            columns = [arena.columns[name] for name in policy.columns]
            rows = self._for_kernel(policy, self.count)
            kernel(self.logits, self.lse, rows, arena.free_slot, columns, self.quota)
            return
        over = self.count > arena.cap + (policy.block - 1)
        evicts = self.due and not (self.readable and not bool(over.any()))
        arena.free_slot.fill_(-1)
        for part in self._parts():
            p = self._update(policy, part)
            if evicts:
                self._evict(policy, part, over, self.count, self.position + 1, attention=p)

    def _update(self, policy: StepPolicy, part: slice) -> Tensor:
        """Let the policy add this step's attention to its columns, in some layers. Returns the
        attention [l * H, N]."""
        arena = self.arena
        index, live = self._rows(part, self.count)
        p = policy.attention(self.logits[part].flatten(0, 1), self.lse[part].flatten(0, 1), live)
        if not policy.columns:
            return p
        first, end = arena.region[part.start], arena.region[part.stop]
        # Padding is written to an extra row behind the last one.
        place = torch.where(live, index - first, end - first).flatten()

        def by_row(values: Tensor) -> Tensor:
            return p.new_zeros(end - first + 1).scatter_(0, place, values.flatten())[:-1]

        def visible() -> Tensor:
            seen = torch.minimum(self.count[part], self.window[part, None]).flatten()
            return by_row(seen[:, None].expand_as(p).to(torch.float32))

        columns = {name: arena.columns[name][first:end] for name in policy.columns}
        policy.update(columns, by_row(p), visible)
        return p

    def _evict(
        self,
        policy: StepPolicy,
        part: slice | int,
        over: Tensor,
        length: Tensor,
        position: Tensor,
        *,
        attention: Tensor | None = None,
        probes: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
    ) -> None:
        """In the heads that are `over` bool [L, H], the row with the lowest score leaves: it
        becomes the head's free slot. If the policy evicts several at once, the head's last rows
        move into the gaps.

        part: the layers. length int64 [L, H]: rows in use. position int64 []: tokens counted.
        attention and probes (query and key): see `StepView`.
        """
        arena, heads = self.arena, self.shape.kv_heads
        layer = part if isinstance(part, int) else None
        part = slice(part, part + 1) if isinstance(part, int) else part
        over, free_slot = over[part].flatten(), arena.free_slot[part].view(-1)
        index, live = self._rows(part, length)
        flat = index.flatten()

        def at_rows(column: Tensor) -> Tensor:
            return column.index_select(0, flat).view(index.shape)

        pos = at_rows(self._positions).to(torch.int64)
        hidden = ~live | (pos < self.pinned) | ~over[:, None]  # other heads give up nothing
        each = slice(part.start * heads, part.stop * heads)
        view = StepView(
            position,
            pos.masked_fill(hidden, -1),
            arena.cap[part].flatten(),
            self._layer[each],
            self._head[each],
            _Each(policy.columns, lambda name: at_rows(arena.columns[name])),
            attention,
            probes[0],
            probes[1],
            lambda some: arena.read(self.ops, "k", index[some]),
            layer,
            self.readable,
            heads,
            int(self.position) + 1 if self.readable else self.shape.max_context + 1,
        )
        scores = policy.score(view, policy.block)
        if policy.block == 1:
            self.ops.lowest(scores, view.pos, arena.start[part].flatten(), over, free_slot)
            return
        gone = leaving(scores, view.pos, over * policy.block)
        count, slot = self.count[part].view(-1), self.slot[part].view(-1)
        close_gaps(self._written.values(), index, gone, count, slot, policy.block)
        count -= gone.sum(1)

    def _show(self, policy: StepPolicy, length: Tensor) -> None:
        """Update the positions that the policy sees: rows that leave last are hidden, while there
        are enough others. length int64 [L, H]: the rows in use."""
        if self.leaves_last is None or self._shown is None:
            return
        least = policy.sinks + policy.recent + policy.block
        pos = self.arena.columns["pos"]
        for part in self._parts():
            index, live = self._rows(part, length)
            at = pos[index]
            may = live & (at >= self.pinned)
            others = may & ~self.leaves_last[index]
            enough = others.sum(1, keepdim=True) >= least
            shown = at.masked_fill(~torch.where(enough, others, may), -1)
            # Padding repeats a head's last row, and so does its value.
            last = (length[part].flatten()[:, None] - 1).clamp(min=0)
            reach = torch.arange(self.width, device=self.device)
            shown = shown.gather(1, torch.minimum(reach, last))
            self._shown.index_copy_(0, index.flatten(), shown.flatten())

    def _free_unseen(self) -> None:
        """In layers with a sliding window: the oldest row of a head that the next token does not
        see leaves before all others."""
        arena = self.arena
        for part in self._parts():
            index, live = self._rows(part, self.count)
            at = arena.columns["pos"][index].to(torch.int64).masked_fill(~live, _ENDLESS)
            oldest, place = at.min(1)
            window = self.window[part, None].expand(-1, self.shape.kv_heads).flatten()
            free = arena.free_slot[part].view(-1)
            row = arena.start[part].flatten() + place
            free.copy_(torch.where(oldest <= self.position + 1 - window, row, free))

    # -- rows ---------------------------------------------------------------------------------

    def _parts(self) -> Iterator[slice]:
        """The layers, divided so that about `_AT_ONCE` rows are computed at once."""
        layers = self.shape.layers
        many = max(1, _AT_ONCE // max(1, self.width * self.shape.kv_heads))
        yield from (slice(lo, min(lo + many, layers)) for lo in range(0, layers, many))

    def _rows(self, part: slice, length: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the heads of some layers: (index into the columns, live bool), [l * H, width]
        each. length int64 [L, H]: the rows in use.

        Padding is not live and repeats a head's last row. If all layers are one part, the result is
        kept while no head grows."""
        whole = part.stop - part.start == self.shape.layers
        if whole and self._used is not None and self.readable:
            used, index, live = self._used
            if torch.equal(used, length):
                return index, live
        start, count = (t[part].flatten()[:, None] for t in (self.arena.start, length))
        reach = torch.arange(self.width, device=self.device)
        index = start + torch.minimum(reach, (count - 1).clamp(min=0))
        index, live = index.clamp(max=max(0, self.arena.rows - 1)), reach < count
        if whole and self.readable:
            self._used = length.clone(), index, live
        return index, live

    @property
    def _positions(self) -> Tensor:
        """int32 [R]: the position of each row, as the policy sees it."""
        return self.arena.columns["pos"] if self._shown is None else self._shown

    def _for_kernel(self, policy: StepPolicy, length: Tensor) -> kernels.Rows:
        """The argument of a kernel for all heads. length int64 [L, H]: the rows in use."""
        arena = self.arena
        tables = arena.start, length, arena.cap, self._positions, self.position
        return kernels.Rows(*tables, policy.sinks, policy.recent, self.pinned)


class _Each(Mapping[str, Tensor]):
    """Columns by name, each of which is made when it is asked for."""

    def __init__(self, names: Collection[str], make: Callable[[str], Tensor]) -> None:
        self._names, self._make = names, make

    def __getitem__(self, name: str) -> Tensor:
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _in_place(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    """`new`, copied into the memory of `old` if they have the same shape."""
    if old is None or new is None or old.shape != new.shape:
        return new
    return old.copy_(new)
