"""Heads before a step that evicts before attention, and what such a step leaves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import guards
import torch
from guards import untouched
from torch import Tensor
from triton_device import draw, randoms

from minikv.kernels import Rows

HEADS = [
    # layers, heads, longest head, size, dtype of the rows, sinks, recent, pinned
    (2, 3, 21, 64, torch.bfloat16, 3, 2, 0),
    (1, 2, 17, 80, torch.float32, 0, 1, 9),
    (3, 1, 40, 96, torch.int8, 999, 0, 0),
    (1, 1, 1, 256, torch.float16, 0, 1, 0),
]


def full_heads(case: tuple[Any, ...], *, hidden: bool) -> tuple[Rows, Tensor, dict[str, Tensor]]:
    """Heads of all layers before a step, some full, some with a free slot, some with room; where
    the new rows go; and their columns. hidden: some positions are not shown."""
    layers, heads, wide, size, dtype, sinks, recent, pinned = case
    length = torch.randint(1, wide + 1, (layers, heads), generator=randoms(1))
    length[0, 0] = wide
    start = ((length + 3).flatten().cumsum(0) - length.flatten()).view_as(length)
    cap = length + torch.randint(0, 3, length.shape, generator=randoms(2)) // 2
    cap[0, 0] = wide
    free_slot = start.where(torch.rand(length.shape, generator=randoms(3)) < 0.2, -1)
    free_slot[0, 0] = -1
    rows = int((start + length).max()) + 3
    pos = torch.full((rows,), torch.iinfo(torch.int32).max // 2)
    for begin, count in zip(start.flatten().tolist(), length.flatten().tolist(), strict=True):
        pos[begin : begin + count] = torch.randperm(2 * wide, generator=randoms(begin))[:count]
    shown = pos.where(torch.rand(rows, generator=randoms(4)) < 0.6, -1) if hidden else pos
    columns = {
        "k": draw(5, (rows, size), torch.float32, 9.0).to(dtype),
        "v": draw(6, (rows, size), torch.float32, 9.0).to(dtype),
        "pos": pos.to(torch.int32),
        "norm": torch.randint(0, 3, (rows,), generator=randoms(7)).float(),
        "leaves_last": torch.rand(rows, generator=randoms(8)) < 0.5,
    }
    given = (start, length, cap, shown.to(torch.int32), torch.tensor(2 * wide))
    return Rows(*given, sinks, recent, pinned), free_slot, columns


def left(
    step: Callable[..., None],
    rows: Rows,
    free_slot: Tensor,
    columns: dict[str, Tensor],
    *more: object,
    device: str = "cpu",
    **block: int,
) -> list[Tensor]:
    """What a step writes on the device: free slots, slots, and the rows that it puts aside."""
    guarded = partial(guards.guarded, device=device)
    moved = Rows(
        *(guarded(t) for t in (rows.start, rows.length, rows.cap, rows.pos, rows.newest)),
        rows.sinks,
        rows.recent,
        rows.pinned,
    )
    there = {name: guarded(column) for name, column in columns.items()}
    heads = free_slot.numel()
    undo = {
        name: guarded(torch.ones((heads, *column.shape[1:]), dtype=column.dtype))
        for name, column in columns.items()
    }
    free, slot = guarded(free_slot), guarded(torch.full(free_slot.shape, 77))
    given = [there["norm"] if more == ("norm",) else value for value in more]
    step(moved, free, slot, there, undo, *given, **block)
    written = [free, slot, *undo.values()]
    assert all(untouched(t) for t in (*written, *there.values()))
    for name, column in columns.items():
        assert torch.equal(there[name].cpu(), column), name
    return written
