"""One decode step: every head gets a row for the new token, the token's query attends, and a head
that is over its cap loses a row.

    attend   before the first layer, a policy that evicts before attention chooses its victims (in
             each layer, if it needs the query); in each layer, the new row is written in every
             column, and the query attends to the rows of its head
    end      update the policy's columns, choose the row that leaves each head over its cap, and
             where in the arena the next token's row goes

`Kernels.layers` may do `attend` in all layers at once (`step_arena`). `Eviction` chooses the rows.

The row of a token belongs to no head before `end`. So under a policy that evicts after attention, a
step that is not ended has no effect, and may begin before its token is known to belong to the
answer. A step that fails may have changed rows: its cache must be dropped.

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
from minikv.policies.moments import Rotation


class DecodeStep:
    """`Attend` for one token at a time over an arena. Call `open`; for each token, the network's
    forward pass and then `end`; finally `close`.

    compiled: identifies everything that kernels are compiled for. key: identifies everything that a
    captured step assumes. Each changes when any of that changes.
    """

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        ops: Kernels | None = None,
        rotary: Rotation | None = None,
    ) -> None:
        self.shape, self.ops = shape, ops or Kernels()
        self.eviction = Eviction(shape, device, self.ops, rotary)
        self.position = self.eviction.position  # see `Attend`
        with torch.inference_mode(False):  # written inside and outside of a forward
            # Scratch of GPU kernels, used by one layer after the other.
            self.arrived = torch.zeros(shape.kv_heads, dtype=torch.int32, device=device)
        self.is_open = False
        self._layers: list[tuple[Tensor, ...]] = []  # views by layer, made once to save time
        self._step_arena: object | None = None
        self.compiled: tuple[object, ...] = ()
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
        learnt: Tensor | None = None,
        captured: bool = False,
    ) -> None:
        """Prepare for steps over `arena`, in which every head has room for a row and none is over
        its cap.

        position: tokens counted so far; positions below `pinned` never leave; `leaves_last` bool
        [R]: rows that leave after all others. learnt: see `Outcome`; `close` writes to it what the
        steps added. captured: no step may read a value from the device, and addresses stay where
        they are. Allocates the memory that steps need. Raises what torch raises, and then this
        stays closed. `key` changes whenever something changes that a captured step holds fixed, and
        `compiled` with it where kernels are compiled again.
        """
        step = self.eviction
        step.open(arena, policy, position, pinned, leaves_last, learnt, captured=captured)
        self.arrived.zero_()  # a launch that failed may have left counts
        self._step_arena = None
        whole = (arena.start, step.count, step.slot, step.oldest_seen, *step.scratch)
        self._layers = list(zip(*(t.unbind() for t in whole), strict=True))
        tables = (getattr(arena, name) for name in TABLES)
        own = step.count, step.slot, step.position, step.window, step.oldest_seen, self.arrived
        fixed = *arena.columns.values(), *tables, *own, *step.held
        self.compiled = policy, pinned, step.width, len(step.blank)
        self.key = *self.compiled, *arena.region, *(one.data_ptr() for one in fixed)
        self.is_open = True  # last, so that an incomplete step is never open

    def close(self) -> None:
        """End the steps: release the arena and, unless a graph needs it, the memory of steps."""
        self.eviction.close()
        self.is_open, self._step_arena = False, None
        self._layers = []

    @property
    def nbytes(self) -> int:
        """Bytes held in addition to the arena."""
        return self.eviction.nbytes

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
        """Used instead of `attend` and `attend_unrotated` in every layer: returns the arena in the
        form that `ops.layers` takes. None, without any effect, if there is no such kernel, or if
        the policy does something in each layer that the kernel cannot do."""
        rule, eviction = self._by_query, self.eviction
        if self.ops.step_arena is None or (rule and rule.name not in self.ops.append_evict):
            return None
        if eviction.queries is not None:
            return None
        if self._step_arena is None:
            arena = eviction.arena
            self._step_arena = self.ops.step_arena(
                arena.columns,
                eviction.blank,
                eviction.position,
                arena.start,
                eviction.count,
                eviction.slot,
                self.shape.windows,
                eviction.oldest_seen,
                *(eviction.scratch or (None, None)),
                rule,
                eviction.for_kernel(rule, arena.length) if rule else None,
                arena.free_slot,
            )
        if self._step_arena is not None:
            eviction.before_attention()
        return self._step_arena

    @property
    def _by_query(self) -> StepPolicy | None:
        """The policy, if it uses the query of each layer to choose."""
        policy = self.eviction.policy
        return policy if policy is not None and policy.needs_query else None

    def end(self) -> None:
        """The step's token counts: see `Eviction.end`."""
        self.eviction.end()

    def advance(self, tokens: int) -> None:
        """See `Attend`. The step counts only with `end`."""
        assert tokens == 1

    # -- the new row, and attention -----------------------------------------------------------

    def _attend(self, layer: int, qkv: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """Write the new row of each head, then attend to all of its rows: mixed values [1, H * G,
        D]. qkv [H * G + 2 * H, D]; rotation: cosine and sine, if they are not rotated yet."""
        if layer == 0:
            self.eviction.before_attention()
        query, columns = self._append(layer, qkv, rotation), self.eviction.arena.columns
        if self.eviction.queries is not None:
            self.eviction.queries[layer].copy_(query)
        start, count, _, oldest, *scratch = self._layers[layer]
        window = self.shape.windows[layer]
        rows = kernels.Segments(
            columns["k"],
            columns["v"],
            start,
            count,
            self.eviction.width,
            None if window is None else columns["pos"],
            None if window is None else oldest,
            columns.get("k_scale"),
            columns.get("v_scale"),
        )
        logits, lse = scratch[:2] or (None, None)
        mixed, _ = self.ops.ragged_attention(query, rows, logits, lse, self.arrived)
        return mixed.reshape(1, self.shape.heads, -1)

    def _append(self, layer: int, qkv: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """Write the new row of each head in every column. A policy that needs the query makes room
        for it first. Returns the rotated queries [H, G, D]."""
        heads, eviction, columns = self.shape.kv_heads, self.eviction, self.eviction.arena.columns
        policy = self._by_query
        kernel = None if policy is None else self.ops.append_evict.get(policy.name)
        if policy is not None and kernel is not None:
            new = self._new_row(layer, qkv, rotation)
            if kernel(policy, new):
                return new.query if new.rotation is None else new.rotation[2]
        row = kernels.Slots(
            self._layers[layer][2],
            eviction.position,
            columns["k"],
            columns["v"],
            columns["pos"],
            eviction.blank,
            columns.get("k_scale"),
            columns.get("v_scale"),
        )
        if rotation is not None and policy is None:
            return self.ops.rotate_append(qkv, *rotation, row)[0]
        both = qkv[:-heads]
        if rotation is not None:
            both = self.ops.rotate(both[None], *rotation)[0]
        query, key = both[:-heads].view(heads, -1, self.shape.head_dim), both[-heads:]
        if policy is not None:
            eviction.by_query(policy, layer, query, key)
        self.ops.append(key, qkv[-heads:], row)
        if policy is not None:
            eviction.note_keys(policy, layer, key[None, :, None])
        return query

    def _new_row(
        self, layer: int, qkv: Tensor, rotation: tuple[Tensor, Tensor] | None
    ) -> kernels.NewRow:
        """The token's rows in one layer, for a kernel that makes room for them."""
        arena, eviction, heads = self.eviction.arena, self.eviction, self.shape.kv_heads
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
            eviction.position,
            eviction.written,
            eviction.width,
            eviction.pinned,
            eviction.positions,
            None if rotation is None else (*rotation, torch.empty_like(query)),
            self.arrived,
        )
