"""Reads a prompt in blocks. After each block the step policy evicts until every head is at its cap.

This is how the papers of step policies read a prompt (RoCo's evict-and-encode, arXiv 2402.06262,
section 4.3; HashEvict, arXiv 2412.16187, section 3). Later tokens attend only to the remaining
rows, so the result is an approximation; in return no layer's keys are ever held in full.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.cache.arena import Arena
from minikv.cache.compaction import Room, gather_survivors
from minikv.cache.eviction import leaving
from minikv.cache.plan import Plan, Setup
from minikv.cache.prefill import check_places
from minikv.cache.snapshot import Outcome
from minikv.kernels import visible_attention
from minikv.kernels.attention.plain import visible
from minikv.kernels.mass.plain import block_logits
from minikv.policies.base import StepView
from minikv.policies.selection import order_of


class BlockPrefill:
    """Has the methods of `Prefill`. Needs memory for `cap` + `stride` rows per head of one layer.

    Blocks begin at multiples of `stride` in the prompt. The network's chunks must begin there too:
    `stride` divides the length of each but the last.
    """

    def __init__(self, setup: Setup, plan: Plan, arena: Arena, target: Arena) -> None:
        """As `Prefill`."""
        rules = setup.rules
        assert rules.step is not None
        assert plan.rows is not None
        self._ops, self._dtype, self.shape = setup.ops, setup.dtype, setup.shape
        self._setup, self._learnt = setup, setup.to_learn(arena.device)
        self.plan, self.arena, self.target = plan, arena, target
        self.step, self.cap, self.stride = rules.step.for_prefill(), plan.rows, rules.stride
        self._front: int  # rows before the block
        self._columns: dict[str, Tensor] = {}
        self._count: Tensor  # int64 [H]: rows that each head holds before the block
        self._added = 0  # rows of the block that each head holds after these
        self._most = 0  # an upper bound for the rows of a head
        self._done = plan.tokens
        self._positions = torch.arange(plan.position, plan.end, device=arena.device)
        self._heads = torch.arange(self.shape.kv_heads, device=arena.device)
        self._caps = torch.full_like(self._heads, self.cap)

    def complete(self) -> Outcome:
        """As `Prefill.complete`, but the attention mass of the evicted rows is not known."""
        check_places(self.target, ())
        return Outcome((None,) * self.shape.layers, learnt=self._learnt)

    @property
    def layer_complete(self) -> bool:
        """Every row of the layer has been read."""
        return self._done == self.plan.tokens

    def done(self, layer: int) -> int:
        """Progress over all layers, as a number of the prompt's tokens."""
        return (layer * self.plan.tokens + self._done) // self.shape.layers

    def stage(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Take in a chunk of rows and attend: shapes as in `Attend.attend`."""
        if self._done == self.plan.tokens:
            self._begin(layer)
        mixed = []
        for lo in range(0, len(q), self.stride):
            hi = lo + self.stride
            mixed.append(self._block(layer, q[lo:hi], k[lo:hi], v[lo:hi]))
        return torch.cat(mixed)

    def finish(self, layer: int) -> None:
        """The layer is complete: write the remaining rows to the target."""
        target, columns = self.target, self._columns
        pos = columns["pos"]
        staged = target.stored(self._ops, columns["k"], columns["v"])
        extra = {name: columns[name] for name in self.step.columns}
        room = Room(floor=self.cap, spare=self.plan.spare)
        keep, window = pos >= 0, self.shape.windows[layer]
        if window is not None:  # drop rows that slid out, as the full cache does
            keep &= pos > self.plan.end - window
        gather_survivors(self._ops, target, layer, keep, pos, room, staged, extra, unordered=0)

    def _begin(self, layer: int) -> None:
        """Start a layer with the rows of earlier turns, oldest first."""
        arena, heads = self.arena, self.shape.kv_heads
        most = int(self.plan.before.held.length[layer].max())
        self._done, self._front, self._most = 0, max(self.cap, most), most
        self._count, self._added = torch.zeros_like(self._heads), 0
        wide, size = self._front + self.stride, self.shape.head_dim
        self._columns = {
            name: torch.zeros((heads, wide, size), dtype=self._dtype, device=arena.device)
            for name in ("k", "v")
        }
        self._columns["pos"] = torch.full((heads, wide), -1, device=arena.device)
        for name, kind in self.step.columns.items():
            self._columns[name] = torch.zeros((heads, wide), dtype=kind, device=arena.device)
        if not most:
            return
        index, live = arena.index(layer, most)
        held = arena.positions(index, live)
        for name in ("k", "v"):
            self._columns[name][:, :most] = arena.read(self._ops, name, index)
        for name in self.step.columns:
            self._columns[name][:, :most] = arena.columns[name][index]
        # The columns computed from keys may be missing if another policy was set before.
        self._note_keys(layer, slice(0, most))
        pos = self._columns["pos"]
        pos[:, :most] = held
        self._move(self._ops.survivors(pos >= 0, order_of(held)))

    def _note_keys(self, layer: int, rows: slice) -> None:
        """Write the columns that depend on a row's key, for these rows of each head."""
        for name, values in self.step.of_key(layer, self._columns["k"][None, :, rows]).items():
            self._columns[name][:, rows] = values[0]

    def _move(self, found: tuple[Tensor, Tensor]) -> None:
        """Move the rows that stay, which `survivors` found, to the front. In the rows after them,
        positions are -1, the policy's columns 0, and keys and values undefined."""
        (index, count), columns = found, self._columns
        rows = columns["pos"].shape[1]
        gone = torch.arange(rows, device=index.device) >= count[:, None]
        index = index.masked_fill(gone, 0)
        at = (index + self._heads[:, None] * rows).flatten()
        moved = {n: columns[n].flatten(0, 1).index_select(0, at).view_as(columns[n]) for n in "kv"}
        moved["pos"] = columns["pos"].gather(1, index).masked_fill_(gone, -1)
        for name in self.step.columns:
            moved[name] = columns[name].gather(1, index).masked_fill_(gone, 0)
        self._columns, self._count, self._added = moved, count, 0

    def _block(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shape, step, columns = self.shape, self.step, self._columns
        rows, heads = len(q), shape.kv_heads
        first = self.plan.position + self._done
        if self._learnt is not None:
            self._setup.learn(self._learnt, layer, q, first)
        query = q.view(rows, heads, -1, shape.head_dim).permute(1, 2, 0, 3)  # [H, G, t, D]
        key = k.transpose(0, 1)
        window = shape.windows[layer]
        if window is not None:  # drop rows that the block's first token no longer sees
            columns["pos"].masked_fill_(columns["pos"] <= first - window, -1)
        if step.evict_first:
            self._evict(layer, first, rows, query=query, key=key)
            columns = self._columns
        new = slice(self._front, self._front + rows)
        columns["k"][:, new], columns["v"][:, new] = key, v.transpose(0, 1)
        self._note_keys(layer, new)
        at = self._positions[self._done : self._done + rows]
        columns["pos"][:, new] = at
        seen_k, seen_v, pos = (columns[name][:, : new.stop] for name in ("k", "v", "pos"))
        mixed, lse = visible_attention(query, seen_k, seen_v, at, pos, window)
        self._done, self._added, self._most = self._done + rows, rows, self._most + rows
        if not step.evict_first:
            last = self._learn(query, lse, at, window)
            self._evict(layer, first + rows, 0, attention=last)
        return mixed.permute(2, 0, 1, 3).reshape(rows, shape.heads, -1)

    def _learn(self, query: Tensor, lse: Tensor, at: Tensor, window: int | None) -> Tensor:
        """Update the policy's columns. Every query counts as one step for the rows that it sees.
        Returns the attention that the last query gave each row, float32 [H, N]."""
        step, wide = self.step, self._front + self.stride
        end = self._front + len(at)
        key, pos = self._columns["k"][:, :end], self._columns["pos"][:, :end]
        seen = visible(at, pos, window)
        p = step.attention(block_logits(query, key), lse.transpose(1, 2), seen)
        count = seen.sum(2, dtype=torch.float32)  # [H, t]
        noted = {name: self._columns[name] for name in step.columns}
        for i in range(len(at) if noted else 0):  # a query leaves later rows as they are
            rows = slice(0, self._front + i + 1)
            given = p[:, i, rows]
            step.update(
                {name: column[:, rows] for name, column in noted.items()},
                given,
                partial(count[:, i, None].expand_as, given),
            )
        last = p[:, -1]
        return last if end == wide else F.pad(last, (0, wide - end))

    def _evict(
        self,
        layer: int,
        position: int,
        coming: int,
        *,
        attention: Tensor | None = None,
        query: Tensor | None = None,
        key: Tensor | None = None,
    ) -> None:
        """Evict by the policy's scores until every head's rows and `coming` new ones fit its cap,
        and move the others to the front."""
        pos, limit = self._columns["pos"], self.cap - coming
        stays = pos >= 0
        if self._most > limit:
            live, added = self._count, self._added
            if self.shape.windows[layer] is not None:  # some may have slid out
                live, added = stays.sum(1), 0
            counts = (live - (limit - added)).clamp(min=0)
            if pos.device.type != "cpu" or bool(counts.any()):
                shown = pos.masked_fill(pos < self.plan.pinned, -1)
                view = StepView(
                    position,
                    shown,
                    self.step.free(shown, position, counts[:, None]),
                    self._caps,
                    counts[:, None],
                    layer,
                    len(self._heads),
                    self._columns.__getitem__,
                    attention,
                    query.flatten(1, 2) if query is not None and self.step.needs_query else None,
                    key,
                    lambda heads: self._columns["k"][heads],
                    lambda heads: self._columns["v"][heads],
                    context=position + 1,
                    learnt=None if self._learnt is None else self._learnt[layer],
                    rotary=self._setup.rotary,
                )
                stays &= ~leaving(self.step.worth(view), pos, counts)
            self._most = limit
        found = self._ops.survivors(stays, pos[:, :0])
        # On a GPU this check would make the host wait.
        if pos.device.type == "cpu":  # pragma: no branch - a GPU skips it
            assert bool((found[1] <= limit).all()), "too few rows may leave"
        self._move(found)
