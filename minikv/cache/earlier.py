"""The rows of one layer that remain from earlier turns, in the form in which a later prompt attends
to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minikv import kernels
from minikv.cache.arena import Arena, Layout
from minikv.kernels.dispatch import Kernels


@dataclass(frozen=True, slots=True, eq=False)
class EarlierRows:
    """N rows of each head, padded.

    index int64 [H, N]: their indices in the arena.
    pos int64 [H, N]: their positions, -1 for padding.
    key and value: [H, N, D]; if `listed`, the arena's whole columns [R, D], into which `index`
        points.
    rows: keys and values [R, D] and positions [R]; segments: start, length and free slot [H] of
        each head in these.
    even: all heads have N rows and no free slot.
    """

    index: Tensor
    pos: Tensor
    key: Tensor
    value: Tensor
    listed: bool
    rows: tuple[Tensor, Tensor, Tensor]
    segments: tuple[Tensor, Tensor, Tensor]
    even: bool

    @staticmethod
    def of(ops: Kernels, arena: Arena, held: Layout, layer: int) -> EarlierRows | None:
        """The rows of a layer; None if it has none. held: the arena's tables on the host.

        Rows of even heads are views of the arena; int8 rows are copies.
        """
        length, free_slot = held.length[layer], held.free_slot[layer]
        if not bool((held.held[layer] > 0).any()):
            return None
        most = int(length.max())
        starts, gone = arena.start[layer], arena.free_slot[layer]
        index, live = arena.index(layer, most)
        pos, listed = arena.positions(index, live), is_listed(held, layer)
        rows = arena.columns["k"], arena.columns["v"], arena.columns["pos"]
        key, value, _ = rows
        full = bool((free_slot < 0).all())
        if arena.coded:
            key, value = arena.read(ops, "k", index), arena.read(ops, "v", index)
            first = torch.arange(0, index.numel(), most, device=index.device)
            if not full:
                gone = torch.where(gone < 0, -1, gone - starts + first)
            rows = key.flatten(0, 1), value.flatten(0, 1), pos.flatten().to(torch.int32)
            starts, listed = first, False
        elif not listed:
            begin, step = int(held.start[layer, 0]), int(held.capacity[layer, 0])
            key, value = (
                column[begin : begin + arena.heads * step].view(arena.heads, step, -1)[:, :most]
                for column in (key, value)
            )
        even = not listed and full and bool((length == most).all())
        segments = starts, arena.length[layer], gone
        return EarlierRows(index, pos, key, value, listed, rows, segments, even)

    @property
    def part(self) -> kernels.Part:
        """The keys and positions as a `kernels.Part`."""
        return (self.key, self.pos, self.index) if self.listed else (self.key, self.pos)

    def first(self, count: int) -> kernels.Part:
        """The keys and positions of the rows at the first `count` positions, as far as they are
        held."""
        most = min(count, self.pos.shape[1])
        at = self.pos.masked_fill((self.pos < 0) | (self.pos >= count), count)
        pos, place = (t[:, :most] for t in at.sort(dim=1))  # on a GPU topk takes more launches
        heads = torch.arange(len(pos), device=pos.device)[:, None]
        key = self.key[self.index[heads, place]] if self.listed else self.key[heads, place]
        return key, pos.masked_fill(pos == count, -1)

    def carried(self, column: Tensor, new: int) -> Tensor:
        """A column of the arena [R] as [H, N + new]: zero for padding and for `new` more rows."""
        heads, rows = self.index.shape
        carried = column.new_zeros((heads, rows + new))
        carried[:, :rows] = column[self.index].masked_fill(self.pos < 0, 0)
        return carried

    def keys(self) -> Tensor:
        """[H, N, D]. Padding rows may hold any value."""
        return self.key[self.index] if self.listed else self.key

    def values(self) -> Tensor:
        """[H, N, D]. Padding rows may hold any value."""
        return self.value[self.index] if self.listed else self.value

    def attention(
        self, ops: Kernels, query: Tensor, at: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Attention of the queries [H, G, T, D] at positions `at` [T] to these rows: output and
        log-sum-exp, as `kernels.rows_attention` returns them."""
        if self.even and window is None:
            return ops.rows_attention(query, self.key, self.value)
        key, value, pos = self.rows
        start, length, free_slot = self.segments
        rows = kernels.Segments(key, value, start, length, self.index.shape[1], pos)
        return ops.ragged_prefill(query, rows, free_slot, at, window)


def is_listed(held: Layout, layer: int) -> bool:
    """Whether a layer's rows, if they are not int8, must be listed, and copied where they are read:
    its heads differ in length or capacity, or have free slots. Otherwise they are views."""
    tables = held.length[layer], held.capacity[layer]
    same = all(bool((table == table[0]).all()) for table in tables)
    return not same or bool((held.free_slot[layer] >= 0).any())
