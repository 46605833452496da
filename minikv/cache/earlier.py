"""The rows that a layer held before a prompt, as the prompt's attention and scores see them."""

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

    index int64 [H, N]: the arena's rows; live bool [H, N]: those that are held; pos int64 [H, N],
    -1 for the others. key and value: [H, N, D], or with `listed` all of the arena's [R, D], of
    which `index` are meant. segments: start, length and free slot [H] of each head's rows, where
    key and value, flattened to rows, are attended to head by head; None if the heads are alike.
    """

    index: Tensor
    live: Tensor
    pos: Tensor
    key: Tensor
    value: Tensor
    listed: bool
    segments: Tensor | None
    copied: int

    @staticmethod
    def of(arena: Arena, held: Layout, layer: int) -> EarlierRows | None:
        """The rows of a layer whose tables on the host are `held`; None if it has none.

        Heads that are alike are views of the arena, int8 rows a copy. `copied` is its bytes, or,
        where heads are uneven, those of one head's keys, which `kernels.observe` may copy.
        """
        length, free_slot = held.length[layer], held.free_slot[layer]
        if not bool((held.held[layer] > 0).any()):
            return None
        most = int(length.max())
        index, live = arena.index(layer, most)
        pos = arena.columns["pos"][index].to(torch.int64).masked_fill(~live, -1)
        even = bool((length == most).all()) and bool((free_slot < 0).all())
        tables = torch.stack((arena.start[layer], arena.length[layer], arena.free_slot[layer]))
        if arena.coded:
            key, value = arena.read("k", index), arena.read("v", index)
            first = torch.arange(len(index), device=index.device) * most
            gone = torch.where(tables[2] < 0, -1, tables[2] - tables[0] + first)
            segments = None if even else torch.stack((first, tables[1], gone))
            size = key.nbytes + value.nbytes
            return EarlierRows(index, live, pos, key, value, False, segments, size)
        step = int(held.capacity[layer, 0])
        if even and bool((held.capacity[layer] == step).all()):
            begin = int(held.start[layer, 0])
            key, value = (
                arena.columns[name][begin : begin + arena.heads * step].view(arena.heads, step, -1)[
                    :, :most
                ]
                for name in ("k", "v")
            )
            return EarlierRows(index, live, pos, key, value, False, None, 0)
        key, value = arena.columns["k"], arena.columns["v"]
        size = most * key[:1].nbytes
        return EarlierRows(index, live, pos, key, value, True, tables, size)

    @property
    def part(self) -> kernels.Part:
        """The keys as `kernels.observe` takes them."""
        return (self.key, self.pos, self.index) if self.listed else (self.key, self.pos)

    def keys(self) -> Tensor:
        """[H, N, D]; padding is anything."""
        return self.key[self.index] if self.listed else self.key

    def values(self) -> Tensor:
        """[H, N, D]; padding is anything."""
        return self.value[self.index] if self.listed else self.value

    def attention(
        self, ops: Kernels, query: Tensor, at: Tensor, window: int | None, pos: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `kernels.rows_attention`: what queries [H, G, T, D] at positions `at` [T] see of the
        rows. pos: the arena's column."""
        if self.segments is None:
            if window is None:
                return ops.rows_attention(query, self.key, self.value)
            return kernels.visible_attention(query, self.key, self.value, at, self.pos, window)
        rows_pos = pos if self.listed else self.pos.flatten().to(torch.int32)
        size = query.shape[-1]
        start, length, free_slot = self.segments
        return ops.ragged_prefill(
            query,
            self.key.reshape(-1, size),
            self.value.reshape(-1, size),
            start,
            length,
            free_slot,
            self.index.shape[1],
            pos=rows_pos,
            q_pos=at,
            window=window,
        )
