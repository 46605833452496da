"""Reads a prompt in blocks. After each block the step policy evicts until every head is at its cap.

This is how the papers of step policies read a prompt (RoCo's evict-and-encode, arXiv 2402.06262,
section 4.3; HashEvict, arXiv 2412.16187, section 3). Later tokens attend only to the rows that are
left, so the result is an approximation; in return no layer's keys are ever held in full.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minikv import kernels
from minikv.cache.arena import Arena, Layout
from minikv.cache.compaction import Room, gather_survivors
from minikv.cache.plan import Plan
from minikv.cache.prefill import check_places
from minikv.cache.snapshot import Outcome
from minikv.cache.stats import Shape
from minikv.kernels.dispatch import Kernels
from minikv.policies.base import StepPolicy, StepView, leaving


class BlockPrefill:
    """Has the methods of `Prefill`, and works on `cap` + `stride` rows per head of one layer.

    Blocks begin at multiples of `stride` in the prompt, and so must the chunks that the network
    hands over: `stride` divides the length of each but the last.
    """

    def __init__(
        self,
        shape: Shape,
        arena: Arena,
        held: Layout,
        target: Arena,
        step: StepPolicy,
        plan: Plan,
        cap: int,
        stride: int,
        dtype: torch.dtype,
        ops: Kernels | None = None,
    ) -> None:
        """As `Prefill`; cap: rows per head that stay; stride: rows of a block."""
        self._ops = ops or Kernels()
        self.shape, self.arena, self.target, self.step = shape, arena, target, step.for_prefill()
        self.plan, self.cap, self.stride = plan, cap, stride
        self._dtype, self._held = dtype, held
        self._front: int  # rows before those of the block
        self._columns: dict[str, Tensor] = {}
        self._last: Tensor | None = None  # attention that the block's last query gave each row
        self._done = plan.tokens
        self.peak = arena.nbytes + target.nbytes

    def complete(self) -> Outcome:
        """As `Prefill.complete`, but the attention mass of the evicted rows is not known."""
        check_places(self.target, ())
        return Outcome((None,) * self.shape.layers)

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
        """The layer is complete: write the rows that are left to the target."""
        target, columns = self.target, self._columns
        pos = columns["pos"]
        staged = target.stored(self._ops, columns["k"], columns["v"])
        extra = {name: columns[name] for name in self.step.columns}
        gather_survivors(
            self._ops,
            target,
            layer,
            pos >= 0,
            pos,
            Room(floor=self.cap, spare=self.plan.spare),
            staged,
            extra,
            unordered=pos.shape[1],
        )

    def _begin(self, layer: int) -> None:
        """Start a layer with the rows of earlier turns, oldest first."""
        arena, heads = self.arena, self.shape.kv_heads
        count = int(self._held.length[layer].max())
        index, live = arena.index(layer, count)
        self._done, self._front = 0, max(self.cap, count)
        wide, size = self._front + self.stride, self.shape.head_dim
        self._columns = {
            name: torch.zeros((heads, wide, size), dtype=self._dtype, device=arena.device)
            for name in ("k", "v")
        }
        self._columns["pos"] = torch.full((heads, wide), -1, device=arena.device)
        for name, kind in self.step.columns.items():
            self._columns[name] = torch.zeros((heads, wide), dtype=kind, device=arena.device)
        self._note_peak()
        if not count:
            return
        for name, column in self._columns.items():
            rows = (
                arena.read(self._ops, name, index)
                if name in ("k", "v")
                else arena.columns[name][index]
            )
            column[:, :count] = rows.to(column.dtype)
        # Columns that are computed from keys may be missing: another policy may have been in force.
        for name, values in self.step.init_state(layer, self._columns["k"][:, :count]).items():
            self._columns[name][:, :count] = values
        self._columns["pos"][:, :count].masked_fill_(~live, -1)
        self._compact(self._columns["pos"] >= 0)

    def _compact(self, keep: Tensor) -> None:
        """Move the rows of `keep` bool [H, N] to the front, oldest first, and drop the others."""
        pos = self._columns["pos"]
        order = pos.masked_fill(~keep, _NEVER).argsort(dim=1, stable=True)
        for name, column in self._columns.items():
            at = order[..., None].expand_as(column) if column.dim() == 3 else order
            self._columns[name] = column.gather(1, at)
        left = torch.arange(pos.shape[1], device=pos.device) < keep.sum(1, keepdim=True)
        self._columns["pos"].masked_fill_(~left, -1)

    def _block(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shape, step, columns = self.shape, self.step, self._columns
        rows, heads = len(q), shape.kv_heads
        first = self.plan.position + self._done
        query = q.view(rows, heads, -1, shape.head_dim).permute(1, 2, 0, 3)  # [H, G, t, D]
        key = k.transpose(0, 1)
        window = shape.windows[layer]
        if window is not None:  # drop what the block's first token no longer sees
            columns["pos"].masked_fill_(columns["pos"] <= first - window, -1)
        if step.evict_first:
            self._evict(layer, first, rows, None, query, key)
            columns = self._columns
        new = slice(self._front, self._front + rows)
        for name in step.columns:
            columns[name][:, new] = 0
        for name, values in step.init_state(layer, key).items():
            columns[name][:, new] = values
        columns["k"][:, new], columns["v"][:, new] = key, v.transpose(0, 1)
        at = torch.arange(first, first + rows, device=q.device)
        columns["pos"][:, new] = at
        end = new.stop
        seen = columns["k"][:, :end], columns["v"][:, :end]
        pos = columns["pos"][:, :end]
        mixed, lse = kernels.visible_attention(query, *seen, at, pos, window)
        self._done += rows
        if not step.evict_first:
            self._learn(query, lse, at, window)
            self._evict(layer, first + rows, 0, self._last, None, None)
        return mixed.permute(2, 0, 1, 3).reshape(rows, shape.heads, -1)

    def _learn(self, query: Tensor, lse: Tensor, at: Tensor, window: int | None) -> None:
        """Update the policy's columns: every query counts as one step for the rows that it sees."""
        columns, end = self._columns, self._front + len(at)
        pos = columns["pos"][:, None, :end]
        logits = query.float() @ columns["k"][:, None, :end].float().transpose(2, 3)
        logits = (logits * (1.0 / math.sqrt(query.shape[-1]))).transpose(1, 2)  # [H, t, G, n]
        gone = (pos < 0) | (pos > at[:, None])
        if window is not None:
            gone |= pos <= at[:, None] - window
        p = self.step.attention(logits, lse.transpose(1, 2), ~gone)  # [H, t, n]
        for i in range(len(at)):
            part = slice(0, self._front + i + 1)
            counts = (~gone[:, i, part]).sum(1, keepdim=True).to(torch.float32)
            self.step.update(
                {name: columns[name][:, part] for name in self.step.columns},
                p[:, i, part],
                lambda counts=counts, part=part: counts.expand(-1, part.stop),  # type: ignore[misc]
            )
        self._last = torch.zeros(columns["pos"].shape, device=p.device)
        self._last[:, :end] = p[:, -1]

    def _evict(
        self,
        layer: int,
        position: int,
        coming: int,
        attention: Tensor | None,
        query: Tensor | None,
        key: Tensor | None,
    ) -> None:
        """Evict until every head's rows and `coming` new ones fit its cap."""
        columns = self._columns
        pos = columns["pos"]
        over = ((pos >= 0).sum(1) + coming - self.cap).clamp(min=0)
        keep = pos >= 0
        most = int(over.max())
        if most:
            heads = torch.arange(len(pos), device=pos.device)
            visible = pos.masked_fill(pos < self.plan.pinned, -1)  # without the pinned rows
            view = StepView(
                position,
                visible,
                torch.full_like(heads, self.cap),
                torch.full_like(heads, layer),
                heads,
                {name: columns[name] for name in self.step.columns},
                attention,
                None if query is None else query.flatten(1, 2),
                key,
                lambda heads: columns["k"][heads],
                layer,
            )
            scores, free = self.step.score(view, most)
            keep = keep & ~leaving(scores, visible, free, over)
            assert bool((keep.sum(1) + coming <= self.cap).all()), "too few rows may leave"
        self._compact(keep)

    def _note_peak(self) -> None:
        held = self.arena.nbytes + self.target.nbytes
        self.peak = max(self.peak, held + sum(column.nbytes for column in self._columns.values()))


_NEVER = 1 << 40
