"""Arenas before a prompt: without rows, even, uneven; and kernels for a device without memory."""

from __future__ import annotations

import torch
from torch import Tensor

from minikv.cache.arena import Arena, Layout
from minikv.kernels.dispatch import Kernels

HEADS, SIZE = 3, 4


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def filled(rows: list[int], lengths: list[list[int]], kv: torch.dtype | None) -> Arena:
    """An arena whose every row in use says what it is."""
    like = Arena(len(rows), HEADS, SIZE, torch.float32, torch.device("cpu"), {}, kv=kv)
    arena = like.fresh(rows, {"sum": torch.float32})
    arena.lay(torch.tensor([[r // HEADS] * HEADS for r in rows]))
    arena.length.copy_(torch.tensor(lengths))
    for column in arena.columns.values():
        made = torch.randint(-99, 99, column.shape, generator=random(len(column)))
        column.copy_(made)
    return arena


def segment(arena: Arena, name: str, layer: int, head: int) -> Tensor:
    """The rows in use of one head: a view [length, ...] of a column."""
    begin = int(arena.start[layer, head])
    return arena.columns[name][begin : begin + int(arena.length[layer, head])]


class Silent(Kernels):
    """Kernels whose twins loop over counts on the host leave what they return unwritten, as those
    of a GPU look from the host."""

    def ragged_prefill(self, q: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)

    def gather_rows(self, *_: object) -> None: ...
    def gather_columns(self, *_: object) -> None: ...


def empty(layers: int, heads: int) -> Layout:
    """The tables on the host of an arena without rows."""
    none = torch.zeros((layers, heads), dtype=torch.int64)
    return Layout(none, none, none, none, none - 1)


def uneven(layers: int, heads: int) -> Layout:
    """Of heads that hold 20 or 7 of 130 rows each, and one of them has a free slot."""
    none = torch.zeros((layers, heads), dtype=torch.int64)
    start = (none + 130).cumsum(1) - 130
    tables = Layout(start, none + 20, none + 130, none + 20, none - 1)
    tables.length[:, 1] = 7
    tables.free_slot[:, 0] = 3
    return tables
