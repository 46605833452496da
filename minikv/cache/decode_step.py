"""One decode step: every head gets a row for the new token, the token's query attends, and every
head that is over its cap gives up a row.

The step is the same on every device. In order:

    place      choose where in the arena each head's new row goes       (all heads at once)
    append     write the new row, in every column                       (layer by layer)
    attention  the query attends to the rows of its head                (layer by layer)
    update     add this step's attention to the policy's statistics     (all heads at once)
    evict      choose the row that leaves each head over its cap        (all heads at once)

`attend_unrotated`, or `attend` if queries and keys are already rotated, does `append` and
`attention`. `Kernels.layers` may do both in all layers (`step_arena`). `end` does `update` and
`evict`, and then `place` for the next step. If the policy stores the norms of keys, `end` first
computes those of the new rows, for all heads at once. A policy that evicts before attention chooses
its victims between `place` and `append`: for all heads at once before the first layer, or layer by
layer if it needs the query.

Devices differ in the kernels (`ops`) and in the caller. On a CPU the engine calls `end` as soon as
the logits are known to be finite. On CUDA one graph holds `end` of the last step and then the next
step, because the next step is launched before the host knows whether its token belongs to the
answer. So every change in `end` depends on the flag `accepted`, which is on the device, and shapes
never depend on values.

Before `end`, a step writes only to rows that no head holds or that it has a copy of. So `drop` can
undo it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from minikv import kernels
from minikv.cache.arena import Arena
from minikv.cache.block_eviction import Schedule, close_gaps
from minikv.cache.stats import Shape
from minikv.cache.step_rows import StepRows
from minikv.kernels.dispatch import Kernels
from minikv.kernels.torch.choose import leaving
from minikv.policies.base import (
    StepAppend,
    StepEnd,
    StepPolicy,
    StepRoom,
    StepView,
    oldest_of_lowest,
)

_UNKNOWN = -2  # a free slot that the policy's kernel has not written yet
_ENDLESS = 1 << 40  # the window of a layer without sliding-window attention
_AT_ONCE = 1 << 20  # rows, with padding, that `_make_room` scores at once
_MULTIPLE = 256  # a graph's width is a multiple, so that small changes of caps do not change it


class DecodeStep:
    """`Attend` for one token at a time over an arena. Call `open`; for each token, the network's
    forward and then `end` or `drop`; and finally `close`.

    count int64 [L, H]: rows in use, the new one included; slot [L, H]: the new row, an index into
    the columns; overwritten bool [L, H]: heads whose new row overwrites a victim of this step, of
    which `undo_rows` has a copy; position int64 []: tokens counted; accepted bool []: the step may
    be made final.
    """

    def __init__(self, shape: Shape, device: torch.device, ops: Kernels | None = None) -> None:
        self.shape, self.device, self.ops = shape, device, ops or Kernels()
        sides = (shape.layers, shape.kv_heads)
        with torch.inference_mode(False):  # written inside and outside of a forward
            self.count = torch.zeros(sides, dtype=torch.int64, device=device)
            self.slot = torch.zeros_like(self.count)
            self.unseen = torch.zeros_like(self.count)  # see `_find_unseen`
            # Scratch of GPU kernels, used by one layer after the other.
            self.arrived = torch.zeros(shape.kv_heads, dtype=torch.int32, device=device)
            self.quota: Tensor | None = None
            self.overwritten = torch.zeros(sides, dtype=torch.bool, device=device)
            self.accepted = torch.zeros((), dtype=torch.bool, device=device)
            self.position = torch.zeros((), dtype=torch.int64, device=device)
            windows = [_ENDLESS if w is None else w for w in shape.windows]
            self.window = torch.tensor(windows, dtype=torch.int64, device=device)
            self.oldest_seen = torch.zeros_like(self.window)  # the oldest that a query sees
            self._layer = torch.arange(shape.layers, device=device).repeat_interleave(sides[1])
            self._head = torch.arange(shape.kv_heads, device=device).repeat(sides[0])
            self._nothing = torch.empty(0, device=device)
        self._slides = any(w is not None for w in shape.windows)
        self._open: StepRows | None = None
        self.policy: StepPolicy | None = None
        self.speculative = False
        self.width = 0
        self.logits = self.lse = self._nothing
        self.leaves_last: Tensor | None = None
        self.shown: Tensor | None = None  # with leaves_last: positions as the policy sees them
        self.undo_rows: dict[str, Tensor] = {}
        self._layers: list[tuple[Tensor, ...]] = []  # views by layer, made once to save time
        self._used: tuple[Tensor, Tensor, Tensor] | None = None  # see `_in_use`
        self._step_arena: object | None = None  # see `step_arena`
        self.half_ended = False  # statistics and victims are final, the lengths are not
        self._asked = False  # a kernel that changes statistics was called; see `_UNKNOWN`
        self.schedule: Schedule
        self.due = True  # what `schedule.is_due` says of the step that `end_if_accepted` ends
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
        speculative: bool = False,
    ) -> None:
        """Get ready for steps over `arena`: every head has room for a row, none is over its cap.

        position: tokens counted so far; positions below `pinned` never leave; `leaves_last` bool
        [R]: rows that leave after all others. A `speculative` step begins before its token is
        known to be accepted; then no step reads a value back from the device. Allocates the memory
        that steps need. Raises what torch raises, and then this stays closed. `key` changes
        whenever something changes that a captured step holds fixed.
        """
        reads = policy is not None and not policy.evict_first
        assert policy is None or reads or policy.block == 1, "one row at a time before attention"
        most = arena.capacity if policy is None else arena.cap + (policy.block if reads else 0)
        multiple = _MULTIPLE if speculative else 16
        width = -(-int(most.max()) // multiple) * multiple
        width = self.width if speculative and width <= self.width <= 4 * width else width
        layers, heads = arena.length.shape
        sides = (layers, heads, self.shape.heads // heads)
        exact = torch.float32  # whatever torch's default is
        with torch.inference_mode(False):
            logits, lse = self.logits, self.lse
            if not reads:
                logits = lse = self._nothing
            elif logits.shape != (*sides, width):
                logits = torch.empty((*sides, width), dtype=exact, device=self.device)
                lse = torch.empty(sides, dtype=exact, device=self.device)
            quota = None if policy is None else policy.quota(arena.cap)
            # A graph holds addresses, so what it reads must stay at the same address.
            leaves_last = _in_place(self.leaves_last, leaves_last)
            shown = None if leaves_last is None else torch.zeros_like(arena.columns["pos"])
            shown = _in_place(self.shown, shown)
            quota = _in_place(self.quota, quota)
            readable = not speculative and self.device.type == "cpu"
            rows = StepRows(
                arena,
                self.ops,
                self.position,
                width,
                pinned,
                leaves_last,
                shown,
                self._layer,
                self._head,
                readable,
            )
            undo_rows = self._undo_rows(rows.written, policy, arena.length.numel())
        # From here on nothing fails.
        self.policy, self.speculative, self.width = policy, speculative, width
        self.logits, self.lse, self.undo_rows = logits, lse, undo_rows
        self.leaves_last, self.shown, self.quota = leaves_last, shown, quota
        self.position.fill_(position)
        self.overwritten.zero_()
        self.arrived.zero_()  # a launch that failed may have left counts
        self.half_ended, self._used, self._step_arena = False, None, None
        self.due = True
        self.schedule = Schedule(policy, arena, position, slides=self._slides)
        whole = (arena.start, self.count, self.slot, self.oldest_seen)
        scratch = (logits, lse) if reads else ()
        self._layers = list(zip(*(t.unbind() for t in (*whole, *scratch)), strict=True))
        self.accepted.zero_()
        self._place(arena)
        tables = (arena.start, arena.length, arena.cap, arena.free_slot)
        work = (logits, lse, *undo_rows.values(), leaves_last, shown, quota)
        fixed = (*arena.columns.values(), *tables, *work)
        self.key = (
            policy,
            pinned,
            width,
            arena.rows,
            *(t.data_ptr() for t in fixed if t is not None),
        )
        self._open = rows  # last, so that an incomplete step is never open

    def _undo_rows(
        self, columns: dict[str, Tensor], policy: StepPolicy | None, heads: int
    ) -> dict[str, Tensor]:
        """For a policy that overwrites victims before a step is final: memory for a copy of one row
        of each head, in every column. Else nothing."""
        if policy is None or not policy.evict_first:
            return {}
        wanted = {n: (c.dtype, (heads, *c.shape[1:])) for n, c in columns.items()}
        if wanted == {n: (c.dtype, tuple(c.shape)) for n, c in self.undo_rows.items()}:
            return self.undo_rows
        return {
            name: torch.zeros(shape, dtype=dtype, device=self.device)
            for name, (dtype, shape) in wanted.items()
        }

    @property
    def is_open(self) -> bool:
        """Between `open` and `close`."""
        return self._open is not None

    @property
    def rows(self) -> StepRows:
        """The rows of the arena. Only between `open` and `close`."""
        assert self._open is not None
        return self._open

    @property
    def tokens(self) -> int:
        """Tokens counted, with that of a half-ended step."""
        # `advance` counts the token and clears `accepted` in one call. An interrupt may come later,
        # while `half_ended` is still set.
        return int(self.position) + (self.half_ended and bool(self.accepted))

    @property
    def left(self) -> Tensor:
        """`Schedule.left` for the step under way."""
        return self.schedule.left(self.count)

    def close(self) -> None:
        """End the steps: release the arena and, unless a graph needs it, the memory of steps."""
        self._open, self._used, self._step_arena = None, None, None
        if not self.speculative:
            self.logits = self.lse = self._nothing
            self.leaves_last = self.shown = None
            self.undo_rows, self._layers = {}, []

    @property
    def nbytes(self) -> int:
        """Bytes held beside the arena."""
        held = (self.logits, self.lse, *self.undo_rows.values(), self.leaves_last, self.shown)
        return sum(t.nbytes for t in (*held, *(self._used or ())) if t is not None)

    # -- a step -------------------------------------------------------------------------------

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend`; one token. Writes the new row of each head, then attends."""
        assert len(q) == 1, "a prompt must be announced with begin()"
        if layer == 0:
            self._make_room()
        query = q[0].view(self.shape.kv_heads, -1, self.shape.head_dim)
        self._append(layer, query, k[0], v[0])
        return self._attention(layer, query)

    def attend_unrotated(self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`attend` for one token whose queries and keys are not rotated yet. qkv: queries, keys and
        values [H * G + 2 * H, D]. cos and sin [1, 1, D]: as `Rotary.table` makes them."""
        arena, policy, heads = self.rows.arena, self.policy, self.shape.kv_heads
        if layer == 0:
            self._make_room()
        if policy is not None and policy.evict_first and policy.needs_query:
            query = qkv[: -2 * heads].view(heads, -1, self.shape.head_dim)
            rotated = torch.empty_like(query)
            rows = qkv[-2 * heads : -heads], qkv[-heads:]
            if not self._append_kernel(policy, layer, query, *rows, (cos, sin, rotated)):
                both = self.ops.rotate(qkv[None, :-heads], cos, sin)[0]
                rotated = both[:-heads].view_as(query)
                self._append(layer, rotated, both[-heads:], qkv[-heads:])
            return self._attention(layer, rotated)
        columns, slot = arena.columns, self._layers[layer][2]
        query, key = self.ops.rotate_append(
            qkv,
            cos,
            sin,
            slot,
            self.position,
            columns["k"],
            columns["v"],
            columns["pos"],
            self._blank(),
            columns.get("k_scale"),
            columns.get("v_scale"),
        )
        if policy is not None:
            self._init_state(policy, layer, key, slot)
        return self._attention(layer, query)

    def step_arena(self) -> object | None:
        """In place of `attend` and `attend_unrotated` in every layer: the arena in the form that
        `ops.layers` takes. None if there is no such kernel, or if the policy does something in each
        layer that this kernel cannot do; then nothing was done."""
        policy, arena, ops = self.policy, self.rows.arena, self.ops
        if ops.step_arena is None:
            return None
        if self._step_arena is None:
            hashing = None
            if policy is not None and policy.layer_by_layer:
                hashing = self._hashing(policy)
                if hashing is None:
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
                self.arrived,
                hashing,
            )
        if self._step_arena is not None:
            self._make_room()
        return self._step_arena

    def _hashing(self, policy: StepPolicy) -> kernels.Hashing | None:
        """See `StepPolicy.hashing`."""
        arena = self.rows.arena
        rows = self.rows.for_kernel(policy, arena.length)
        room = StepRoom(rows, arena.free_slot, self.slot, self.rows.written, self.undo_rows)
        return policy.hashing(room, self.shape.layers, self.shape.head_dim)

    def _attention(self, layer: int, query: Tensor) -> Tensor:
        """Attention of a layer's query [H, G, D] to the rows of each head: mixed values [1, H * G,
        D]."""
        columns = self.rows.arena.columns
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

    def advance(self, tokens: int) -> None:
        """See `Attend`. The step becomes final only by `end`."""
        assert tokens == 1

    def end(self) -> None:
        """The step's token is accepted: update statistics, choose victims, and make the step final.

        After an Exception nothing has changed, and the step may be dropped. But if `half_ended` is
        set, as it may be after an interrupt or an Exception, the step counts, and `end_if_accepted`
        must be called again.
        """
        self.accepted.fill_(True)
        self.due = True
        if self.rows.readable and self.policy is not None and self.policy.block > 1:
            self.due = int(self.left) <= 0
        self.end_if_accepted()

    def end_if_accepted(self) -> None:
        """`end`, if the flag `accepted` is set."""
        arena, policy = self.rows.arena, self.policy
        undo: list[Callable[[], object]] = []
        saved = _undoable(arena.free_slot, undo)
        self._asked = False
        final = self.half_ended  # statistics have changed, and there is no copy of the old
        try:
            if not self.half_ended:
                if policy is not None and policy.norm_column:
                    self._find_norms(policy.norm_column)
                if policy is None or policy.evict_first:
                    arena.free_slot.masked_fill_(self.accepted, -1)
                else:
                    final = self._update_and_evict(policy, saved, undo)
                self.half_ended = True
            if self._slides:
                slid = self._find_unseen(arena)
                torch.where(slid, self.unseen, arena.free_slot, out=arena.free_slot)
            self._place(arena)
        except BaseException as error:
            try:
                if self.rows.readable:  # asked without allocating, as memory may be short
                    slots = arena.free_slot.tolist() if self._asked else [[_UNKNOWN]]
                    if not any(_UNKNOWN in row for row in slots):
                        final = self.half_ended = True  # the policy's kernel has run
                    # Behind `advance`, which clears `accepted`, the step counts.
                    final = final or (self.half_ended and not bool(self.accepted))
            finally:
                if not self.half_ended or (isinstance(error, Exception) and not final):
                    for take_back in reversed(undo):
                        take_back()
                    self.half_ended = False
            raise
        self.half_ended = False

    def _place(self, arena: Arena) -> None:
        """Make the last step final, if accepted. Then choose where each head's next row goes: to
        its free slot, else behind its last row."""
        policy = self.policy
        self.ops.advance(
            self.accepted,
            arena.start,
            arena.length,
            arena.cap,
            arena.free_slot,
            self.position,
            self.count,
            self.slot,
            self.overwritten,
            before=policy is not None and policy.evict_first,
        )
        if self._slides:  # without allocating, because the step counts by now
            torch.sub(self.position, self.window, out=self.oldest_seen).add_(1)

    def drop(self) -> None:
        """Undo the step under way, without allocating; nothing happens if there is none, or if it
        counts already (`half_ended`)."""
        arena = self.rows.arena
        if self.half_ended:
            return
        self.accepted.zero_()
        if not self.undo_rows:
            return
        columns = self.rows.written
        # In a layer for which no victim was chosen yet, no row was overwritten.
        tables = zip(
            self.overwritten.flatten().tolist(), arena.free_slot.flatten().tolist(), strict=True
        )
        for i, (overwritten, row) in enumerate(tables):
            if overwritten and row >= 0:
                for name, saved in self.undo_rows.items():
                    columns[name][row].copy_(saved[i])
                arena.free_slot.view(-1)[i].fill_(-1)

    # -- before attention ---------------------------------------------------------------------

    def _make_room(self) -> None:
        """Before the first layer, for a policy that evicts first and does not need the query:
        choose the row that leaves each full head. It is copied to `undo_rows`, and the new row
        takes its place. If the policy needs the query, only prepare the positions it sees."""
        arena, policy = self.rows.arena, self.policy
        if policy is None or not policy.evict_first:
            return
        if self.rows.readable and not bool(
            ((arena.free_slot < 0) & (arena.length >= arena.cap)).any()
        ):
            return
        self.rows.show(policy, arena.length)
        if policy.needs_query:
            return
        columns = self.rows.written
        rows = self.rows.for_kernel(policy, arena.length)
        room = StepRoom(rows, arena.free_slot, self.slot, columns, self.undo_rows)
        if policy.room_kernel(self.ops, room):
            return
        heads = arena.length.numel()
        many = max(1, _AT_ONCE // max(1, self.width))
        for lo in range(0, heads, many):
            part = slice(lo, min(lo + many, heads))
            start, length = arena.start.flatten()[part], arena.length.flatten()[part]
            cap = arena.cap.flatten()[part]
            index, live = self.rows.index(start, length)
            view = self.rows.view(policy, self.position, index, live, cap, part)
            scores, allowed = policy.score(view, 1)
            self.ops.overwrite_step(
                scores,
                allowed,
                replace(rows, start=start, length=length, cap=cap),
                arena.free_slot.view(-1)[part],
                self.slot.view(-1)[part],
                columns,
                {name: saved[part] for name, saved in self.undo_rows.items()},
            )

    def _append(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Write the new row of each head in every column. query [H, G, D]; key, value [H, D]."""
        arena, policy, slot = self.rows.arena, self.policy, self.slot[layer]
        columns = arena.columns
        if policy is not None and policy.evict_first and policy.needs_query:
            if self._append_kernel(policy, layer, query, key, value):
                return
            self._evict_in_layer(policy, layer, query, key)
        self.ops.append(
            key,
            value,
            slot,
            self.position,
            columns["k"],
            columns["v"],
            columns["pos"],
            self._blank(),
            columns.get("k_scale"),
            columns.get("v_scale"),
        )
        if policy is not None:
            self._init_state(policy, layer, key, slot)

    def _append_kernel(
        self,
        policy: StepPolicy,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        turn: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> bool:
        """Choose the victims by the query and write the new rows, with the policy's kernel. False
        if it has none."""
        arena = self.rows.arena
        heads = slice(layer * len(key), (layer + 1) * len(key))
        append = StepAppend(
            layer,
            query,
            key,
            value,
            arena.start[layer],
            arena.length[layer],
            arena.cap[layer],
            arena.free_slot[layer],
            self.position,
            self.rows.written,
            {name: saved[heads] for name, saved in self.undo_rows.items()},
            self.width,
            self.rows.pinned,
            self.rows.positions,
            turn,
            self.arrived,
        )
        return policy.append_kernel(self.ops, append)

    def _blank(self) -> list[Tensor]:
        """The columns in which a new row starts as 0."""
        columns = self.rows.arena.columns
        extra = [columns[name] for name in self.rows.arena.extra]
        return extra if self.leaves_last is None else [*extra, self.leaves_last]

    def _init_state(self, policy: StepPolicy, layer: int, key: Tensor, slot: Tensor) -> None:
        """Write the columns that a policy computes from a new row's key [H, D], except its norm
        (`_find_norms`)."""
        if policy.norm_column:
            return
        for name, values in policy.init_state(self.ops, layer, key).items():
            self.rows.arena.columns[name].index_copy_(0, slot, values)

    def _evict_in_layer(self, policy: StepPolicy, layer: int, query: Tensor, key: Tensor) -> None:
        """Choose a victim in each full head of a layer by its query."""
        arena = self.rows.arena
        start, length, cap = arena.start[layer], arena.length[layer], arena.cap[layer]
        free_slot = arena.free_slot[layer]
        if self.rows.readable and not bool(((free_slot < 0) & (length >= cap)).any()):
            return
        index, live = self.rows.index(start, length)
        heads = slice(layer * len(key), (layer + 1) * len(key))
        view = self.rows.view(
            policy, self.position, index, live, cap, heads, layer=layer, query=query, key=key
        )
        scores, allowed = policy.score(view, 1)
        self.ops.overwrite_step(
            scores,
            allowed,
            replace(self.rows.for_kernel(policy, length), start=start, cap=cap),
            free_slot,
            self.slot[layer],
            self.rows.written,
            {name: saved[heads] for name, saved in self.undo_rows.items()},
        )

    # -- after attention ----------------------------------------------------------------------

    def _find_norms(self, column: str) -> None:
        """If the step is accepted, write the norms of the new rows' keys. `slot` still names these
        rows, so nothing is written to a row that a head had before."""
        arena = self.rows.arena
        self.ops.key_norms(
            arena.columns["k"],
            arena.columns.get("k_scale"),
            self.slot,
            self.accepted,
            arena.columns[column],
            arena.dtype,
        )

    def _update_and_evict(
        self, policy: StepPolicy, saved: Tensor, undo: list[Callable[[], object]]
    ) -> bool:
        """Update the statistics of all rows and choose the victims: `arena.free_slot`, -1 for a
        head that is not over its cap.

        The policy's own kernel does this, if there is one. Else its torch form does; it adds
        functions to `undo` that take its changes back. saved: a copy of `arena.free_slot`. Returns
        True if a kernel has changed statistics, which cannot be taken back.
        """
        arena = self.rows.arena
        if self.due:
            self.rows.show(policy, self.count)
        rows = self.rows.for_kernel(policy, self.count)
        columns = {name: arena.columns[name] for name in policy.columns}
        end = StepEnd(
            self.logits,
            self.lse,
            rows,
            self.accepted,
            arena.free_slot,
            columns,
            self.quota,
            self.window,
        )
        if self.rows.readable:  # so that it can be seen whether an interrupt came behind the kernel
            arena.free_slot.fill_(_UNKNOWN)
            self._asked = bool(columns)
        if policy.end_kernel(self.ops, end):
            return bool(columns)
        if self.rows.readable:
            self._asked = False
            arena.free_slot.copy_(saved)
        if not self.due and policy.update_kernel(self.ops, end):
            arena.free_slot.masked_fill_(self.accepted, -1)
            return True
        index, live = self._in_use()
        logits, lse = self.logits.flatten(0, 1), self.lse.flatten(0, 1)
        p = policy.attention(logits, lse, live)
        self._update(policy, columns, p, undo)
        if not self.due:
            arena.free_slot.masked_fill_(self.accepted, -1)
            return False
        over = (self.count > arena.cap + (policy.block - 1)).flatten()
        live = live & over[:, None]  # other heads give up nothing
        cap = arena.cap.flatten()
        every = slice(None)
        view = self.rows.view(policy, self.position + 1, index, live, cap, every, attention=p)
        scores, allowed = policy.score(view, policy.block)
        if policy.block > 1:
            self._evict_block(policy, view, index, scores, allowed, undo)
            return False
        if self.ops.lowest_step is not None:
            shape = self.logits.shape[:2]
            scores, allowed = scores.view(*shape, -1), allowed.view(*shape, -1)
            self.ops.lowest_step(scores, allowed, rows, self.accepted, arena.free_slot)
            return False
        victim = index.gather(1, oldest_of_lowest(scores, view.pos, allowed)[:, None])[:, 0]
        victim = torch.where(over, victim, -1).view_as(arena.free_slot)
        torch.where(self.accepted, victim, arena.free_slot, out=arena.free_slot)
        return False

    def _update(
        self,
        policy: StepPolicy,
        columns: dict[str, Tensor],
        p: Tensor,
        undo: list[Callable[[], object]],
    ) -> None:
        """Let the policy add this step's attention p [L * H, N] to its columns [R]."""
        if not columns:
            return
        index, live = self._in_use()
        rows = self.rows.count
        # Padding is written to an extra row behind the last one.
        place = torch.where(live, index, rows).flatten()

        def by_row(values: Tensor) -> Tensor:
            return p.new_zeros(rows + 1).scatter_(0, place, values.flatten())[:rows]

        def visible() -> Tensor:
            seen = torch.minimum(self.count, self.window[:, None]).flatten()
            return by_row(seen[:, None].expand_as(p).to(torch.float32))

        before = [(column, _undoable(column, undo)) for column in columns.values()]
        policy.update(columns, by_row(p), visible)
        if self.speculative:  # only the rows in use, and only if the token is accepted
            final = (by_row(live.to(torch.float32)) > 0) & self.accepted
            for column, old in before:
                column.copy_(torch.where(final, column, old))

    def _evict_block(
        self,
        policy: StepPolicy,
        view: StepView,
        index: Tensor,
        scores: Tensor,
        allowed: Tensor,
        undo: list[Callable[[], object]],
    ) -> None:
        """Heads that are `block` rows over their cap give up so many. Their last rows move into the
        gaps, in every column."""
        arena, many = self.rows.arena, policy.block
        over = view.pos.new_zeros(len(view.pos))
        over += (self.count > arena.cap + (many - 1)).flatten() & self.accepted
        gone = leaving(scores, view.pos, allowed, over * many)
        left = self.count - gone.sum(1).view(self.count.shape)
        arena.free_slot.masked_fill_(self.accepted, -1)
        _undoable(self.count, undo)
        every = self.rows.written.values()
        close_gaps(every, index, gone, self.count.flatten(), self.slot.flatten(), many, undo)
        self.count.copy_(left)
        self._used = None

    def _find_unseen(self, arena: Arena) -> Tensor:
        """Write to `unseen` the row of each head that the window of the next token leaves out, or
        -1. This row leaves before all others. Returns bool [L, H]: the heads that have one."""
        self.ops.unseen_rows(
            arena.start,
            self.count,
            arena.columns["pos"],
            self.position,
            self.window,
            self.accepted,
            self.unseen,
            width=self.width,
        )
        return self.unseen >= 0

    def _in_use(self) -> tuple[Tensor, Tensor]:
        """`StepRows.index` of all heads with the new row, [L * H, width]; kept until one grows."""
        arena = self.rows.arena
        if self._used is not None and self.rows.readable:
            count, index, live = self._used
            if torch.equal(count, self.count):
                return index, live
        index, live = self.rows.index(arena.start.flatten(), self.count.flatten())
        if not self.speculative:
            self._used = (self.count.clone(), index, live)
        return index, live


def _undoable(tensor: Tensor, undo: list[Callable[[], object]]) -> Tensor:
    """A copy of a tensor that is about to change. Adds a function to `undo` that restores it."""
    saved = tensor.clone()
    undo.append(partial(tensor.copy_, saved))
    return saved


def _in_place(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    """`new`, copied into the memory of `old` if they have the same shape."""
    if old is None or new is None or old.shape != new.shape:
        return new
    return old.copy_(new)
