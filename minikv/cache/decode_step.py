"""One decode step: every head gets a row for the new token, the token's query attends, and a head
that is over its cap gives up a row.

    attend   before the first layer, a policy that evicts before attention chooses its victims (in
             each layer, if it needs the query); in each layer, the new row is written in every
             column, and the query attends to the rows of its head
    end      update the policy's columns, choose the row that leaves each head over its cap, and
             where in the arena the next token's row goes

`Kernels.layers` may do `attend` in all layers at once (`step_arena`). `Eviction` chooses the rows.

The row of a token belongs to no head before `end`. So under a policy that evicts after attention, a
step that is not ended leaves nothing behind, and may be begun before its token is known to belong
to the answer. A step that fails may have changed rows: its cache must be dropped.

No shape depends on a value on the device, and a captured step reads nothing from it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minikv import kernels
from minikv.cache.arena import TABLES, Arena
from minikv.cache.eviction import Eviction
from minikv.cache.stats import Shape
from minikv.kernels.dispatch import Kernels
from minikv.policies.base import StepPolicy

_ENDLESS = 1 << 40  # the window of a layer without sliding-window attention
_MULTIPLE = 256  # a graph's width is a multiple, so that small changes of caps do not change it


class DecodeStep:
    """`Attend` for one token at a time over an arena. Call `open`; for each token, the network's
    forward and then `end`; and finally `close`.

    count int64 [L, H]: rows in use, the new one included; slot [L, H]: the new row, an index into
    the columns; position int64 []: tokens counted; due: whether a head may have to evict at the end
    of the step under way.
    """

    def __init__(self, shape: Shape, device: torch.device, ops: Kernels | None = None) -> None:
        self.shape, self.device, self.ops = shape, device, ops or Kernels()
        with torch.inference_mode(False):  # written inside and outside of a forward
            sides = (shape.layers, shape.kv_heads)
            self.count = torch.zeros(sides, dtype=torch.int64, device=device)
            self.slot = torch.zeros_like(self.count)
            # Scratch of GPU kernels, used by one layer after the other.
            self.arrived = torch.zeros(shape.kv_heads, dtype=torch.int32, device=device)
            self.position = torch.zeros((), dtype=torch.int64, device=device)
            windows = [_ENDLESS if w is None else w for w in shape.windows]
            self.window = torch.tensor(windows, dtype=torch.int64, device=device)
            self.oldest_seen = torch.zeros_like(self.window)  # the oldest that a query sees
            self._nothing = torch.empty(0, device=device)
        self._slides = any(w is not None for w in shape.windows)
        self._eviction: Eviction | None = None
        self.policy: StepPolicy | None = None
        self.width = 0
        self.captured = False
        self.quota: Tensor | None = None
        self.logits = self.lse = self._nothing
        self.leaves_last: Tensor | None = None
        self.shown: Tensor | None = None  # with leaves_last: positions as the policy sees them
        self._layers: list[tuple[Tensor, ...]] = []  # views by layer, made once to save time
        self._step_arena: object | None = None
        self._due_from = 0  # see `is_due`
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
        self.policy, self.captured = policy, captured
        with torch.inference_mode(False):
            self._make_scratch(arena, policy)
            # A graph holds addresses, so what it reads must stay at the same address.
            shown = None if leaves_last is None else torch.zeros_like(arena.columns["pos"])
            self.leaves_last = _in_place(self.leaves_last, leaves_last)
            self.shown = _in_place(self.shown, shown)
            self.quota = _in_place(self.quota, None if policy is None else policy.quota(arena.cap))
        self.position.fill_(position)
        self.arrived.zero_()  # a launch that failed may have left counts
        self.due, self._step_arena, self._due_from = True, None, position
        self._place(arena)
        whole = (arena.start, self.count, self.slot, self.oldest_seen)
        scratch = (self.logits, self.lse) if self.logits.numel() else ()
        self._layers = list(zip(*(t.unbind() for t in (*whole, *scratch)), strict=True))
        own = (self.count, self.slot, self.position, self.oldest_seen, self.window, self.arrived)
        work = (self.logits, self.lse, self.leaves_last, self.shown, self.quota)
        fixed = (*arena.columns.values(), *(getattr(arena, name) for name in TABLES), *own, *work)
        addresses = (t.data_ptr() for t in fixed if t is not None)
        self.key = policy, pinned, self.width, *arena.region, *addresses
        given = self.window, self.count, self.slot, self.width, pinned, self.leaves_last, self.shown
        # Last, so that an incomplete step is never open.
        self._eviction = Eviction(arena, policy, self.shape, self.ops, *given, self.readable)

    def _make_scratch(self, arena: Arena, policy: StepPolicy | None) -> None:
        """Choose the width, and make room for the logits of all heads if the policy reads them."""
        reads = policy is not None and not policy.evict_first
        assert policy is None or reads or policy.block == 1, "one row at a time before attention"
        most = arena.capacity if policy is None else arena.cap + (policy.block if reads else 0)
        multiple = _MULTIPLE if self.captured else 16
        width = -(-int(most.max()) // multiple) * multiple
        stays = self.captured and width <= self.width <= 4 * width
        self.width = self.width if stays else width
        sides = (*self.count.shape, self.shape.heads // self.shape.kv_heads)
        if not reads:
            self.logits = self.lse = self._nothing
        elif self.logits.shape != (*sides, self.width):
            exact = torch.float32  # whatever torch's default is
            self.logits = torch.empty((*sides, self.width), dtype=exact, device=self.device)
            self.lse = torch.empty(sides, dtype=exact, device=self.device)

    @property
    def is_open(self) -> bool:
        """Between `open` and `close`."""
        return self._eviction is not None

    @property
    def eviction(self) -> Eviction:
        """What makes room for rows. Only between `open` and `close`."""
        assert self._eviction is not None
        return self._eviction

    @property
    def arena(self) -> Arena:
        """Only between `open` and `close`."""
        return self.eviction.arena

    @property
    def readable(self) -> bool:
        """Values may be read without waiting for a device."""
        return not self.captured and self.device.type == "cpu"

    def is_due(self, position: int) -> bool:
        """Whether a head has to evict at the end of the step under way, after which `position`
        tokens are counted. Always, if heads evict one row at a time.

        A head grows by a row a step at most, so the device is asked, and waited for, only when the
        head that had the most rows can be full again.
        """
        block = 1 if self.policy is None else self.policy.block
        if block == 1 or position < self._due_from:
            return block == 1
        left: list[int] = (self.arena.cap + block - self.count).flatten().tolist()
        self._due_from = position + min(steps if steps > 0 else block for steps in left)
        return min(left) <= 0

    def close(self) -> None:
        """End the steps: release the arena and, unless a graph needs it, the memory of steps."""
        self._eviction, self._step_arena = None, None
        if not self.captured:
            self.logits = self.lse = self._nothing
            self.leaves_last = self.shown = None
            self._layers = []

    @property
    def nbytes(self) -> int:
        """Bytes held beside the arena."""
        rows = None if self._eviction is None else self._eviction.kept
        used = () if rows is None else (rows.length, rows.index, rows.live)
        held = (self.logits, self.lse, self.leaves_last, self.shown, *used)
        return sum(t.nbytes for t in held if t is not None)

    # -- a step -------------------------------------------------------------------------------

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend`; one token. Writes the new row of each head, then attends."""
        assert len(q) == 1, "a prompt must be announced with begin()"
        return self._attend(layer, torch.cat((q, k, v), 1)[0], None)

    def attend_unrotated(self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`attend` for one token whose queries and keys are not rotated yet. qkv: queries, keys and
        values [H * G + 2 * H, D]. cos and sin [1, 1, D]: as `Rotary.table` makes them."""
        return self._attend(layer, qkv, (cos, sin))

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
            rows = None
            if rule is not None:
                rows = self.eviction.for_kernel(rule, arena.length, self.position)
            self._step_arena = ops.step_arena(
                arena.columns,
                self.eviction.blank,
                self.position,
                arena.start,
                self.count,
                self.slot,
                self.shape.windows,
                self.oldest_seen,
                *scratch,
                rule,
                rows,
                arena.free_slot,
            )
        if self._step_arena is not None:
            self.eviction.before_attention(self.position)
        return self._step_arena

    def end(self) -> None:
        """The step's token counts: update the policy's columns, choose the rows that leave, and
        where the rows of the next token go."""
        arena, policy, eviction = self.arena, self.policy, self.eviction
        if policy is not None and policy.has_key_columns and not policy.needs_query:
            self._note_keys(policy, 0, arena.read(self.ops, "k", self.slot)[:, :, None])
        eviction.after_attention(self.logits, self.lse, self.position, self.quota, self.due)
        if self._slides:
            eviction.free_unseen(self.position)
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

    def _attend(self, layer: int, qkv: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        """Write the new row of each head, then attend to all of its rows: mixed values [1, H * G,
        D]. qkv [H * G + 2 * H, D]; turn: cosine and sine, if they are not rotated yet."""
        if layer == 0:
            self.eviction.before_attention(self.position)
        query, columns = self._append(layer, qkv, turn), self.arena.columns
        start, count, _, oldest, *scratch = self._layers[layer]
        window = self.shape.windows[layer]
        rows = kernels.Segments(
            columns["k"],
            columns["v"],
            start,
            count,
            self.width,
            None if window is None else columns["pos"],
            None if window is None else oldest,
            columns.get("k_scale"),
            columns.get("v_scale"),
        )
        logits, lse = scratch[:2] or (None, None)
        mixed, _ = self.ops.ragged_attention(query, rows, logits, lse, self.arrived)
        return mixed.reshape(1, self.shape.heads, -1)

    def _append(self, layer: int, qkv: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        """Write the new row of each head in every column. A policy that needs the query makes room
        for it first. Returns the rotated queries [H, G, D]."""
        heads, eviction, columns = self.shape.kv_heads, self.eviction, self.arena.columns
        policy = self.policy if self.policy is not None and self.policy.needs_query else None
        kernel = None if policy is None else self.ops.append_evict.get(policy.name)
        if policy is not None and kernel is not None:
            new = self._new_row(layer, qkv, turn)
            if kernel(policy, new):
                return new.query if new.turn is None else new.turn[2]
        row = kernels.Slots(
            self._layers[layer][2],
            self.position,
            columns["k"],
            columns["v"],
            columns["pos"],
            eviction.blank,
            columns.get("k_scale"),
            columns.get("v_scale"),
        )
        if turn is not None and policy is None:
            return self.ops.rotate_append(qkv, *turn, row)[0]
        both = qkv[:-heads] if turn is None else self.ops.rotate(qkv[None, :-heads], *turn)[0]
        query, key = both[:-heads].view(heads, -1, self.shape.head_dim), both[-heads:]
        if policy is not None:
            eviction.by_query(policy, layer, self.position, query, key)
        self.ops.append(key, qkv[-heads:], row)
        if policy is not None:
            self._note_keys(policy, layer, key[None, :, None])
        return query

    def _new_row(
        self, layer: int, qkv: Tensor, turn: tuple[Tensor, Tensor] | None
    ) -> kernels.NewRow:
        """The token's rows in one layer, for a kernel that makes room for them."""
        arena, eviction, heads = self.arena, self.eviction, self.shape.kv_heads
        query = qkv[: -2 * heads].view(heads, -1, self.shape.head_dim)
        return kernels.NewRow(
            layer,
            query,
            qkv[-2 * heads : -heads],
            qkv[-heads:],
            arena.start[layer],
            arena.length[layer],
            arena.cap[layer],
            arena.free_slot[layer],
            self.position,
            eviction.written,
            self.width,
            eviction.pinned,
            eviction.positions,
            None if turn is None else (*turn, torch.empty_like(query)),
            self.arrived,
        )

    def _note_keys(self, policy: StepPolicy, layer: int, key: Tensor) -> None:
        """Write the columns that depend on a row's key, for the new rows of the layers from `layer`
        on. key [l, H, 1, D]."""
        slot = self.slot[layer : layer + len(key)].flatten()
        for name, values in policy.of_key(layer, key).items():
            self.arena.columns[name].index_copy_(0, slot, values.flatten())


def _in_place(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    """`new`, copied into the memory of `old` if they have the same shape."""
    if old is None or new is None or old.shape != new.shape:
        return new
    return old.copy_(new)
