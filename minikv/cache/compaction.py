"""Copies the rows of a layer that survive a prompt to their places in the target arena.

Only the device knows how many rows each head keeps. So the device lays out the segments, and
nothing is read back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.cache.arena import TABLES, Arena
from minikv.kernels.dispatch import Kernels
from minikv.policies.selection import order_of


@dataclass(frozen=True, slots=True)
class Room:
    """How many rows a layer's heads may keep and own: arguments of the kernel `lay_out`.

    total: the sum of the heads' caps. A cap is the number of rows that the head holds, and the rest
    of `total` is divided evenly (-1: no rest; each cap is at least `floor`). spare: rows that a
    head owns above its cap. all: rows that the heads own together, with the rest divided evenly
    (-1: only caps and spare rows)."""

    floor: int = 0
    total: int = -1
    spare: int = 0
    all: int = -1


def gather_survivors(
    ops: Kernels,
    target: Arena,
    layer: int,
    keep: Tensor,
    pos: Tensor,
    room: Room,
    staged: Mapping[str, Tensor],
    extra: Mapping[str, Tensor],
    earlier: tuple[Arena, Tensor] | None = None,
    unordered: int | None = None,
    order: Tensor | None = None,
) -> None:
    """Copy the kept rows, ascending by position, into adjacent segments.

    keep bool and pos int64 [H, N]: the rows of earlier turns, then the T of the prompt. staged: the
    prompt's rows, as `Arena.stored` makes them of keys and values [H, T, D]. extra: the policies'
    columns [H, N]. earlier: the arena that holds the rows of earlier turns, and their indices in
    it, int64 [H, N - T]. unordered: how many of the first rows are in no particular order; by
    default those of earlier turns. order int64 [H, unordered]: their order by position, if known.
    """
    begin = target.region[layer]
    most = min(keep.shape[1], target.region[layer + 1] - begin)
    if order is None:
        early = keep.shape[1] - staged["k"].shape[1] if unordered is None else unordered
        order = order_of(pos[:, :early])
    index, count = ops.survivors(keep, order)
    start = target.start[layer]
    tables = start, *(getattr(target, name)[layer] for name in TABLES[1:])
    ops.lay_out(count, begin, tables, room.floor, room.total, room.spare, room.all)
    old = None
    if earlier is not None:
        arena, rows = earlier
        old = arena.columns["k"], arena.columns["v"], rows
    into = target.columns["k"], target.columns["v"]
    new = staged["k"], staged["v"]
    ops.gather_rows(index, count, start, new, old, into, (pos, target.columns["pos"]), most)
    scales = {name: staged[name] for name in target.scales}
    if earlier is not None:
        for name, new_scales in scales.items():
            scales[name] = torch.cat((arena.columns[name][rows], new_scales), 1)
    _move(ops, (index, count, start), scales, target, most)
    _move(ops, (index, count, start), extra, target, most)


def append_rows(
    ops: Kernels,
    target: Arena,
    layer: int,
    pos: Tensor,
    caps: Tensor,
    staged: Mapping[str, Tensor],
    extra: Mapping[str, Tensor],
) -> None:
    """Write a prompt's rows after those of earlier turns, which stay where they are.

    Like `gather_survivors`, for a target that shares its memory with the arena before the prompt.
    Every head holds the first N - T rows of `pos`, in this order. caps int64 [H]: the new caps.
    """
    heads, tokens = staged["k"].shape[:2]
    rows = pos.shape[1]
    place = torch.arange(rows, device=pos.device).expand(heads, rows)
    start, length = target.start[layer].clone(), target.length[layer].clone()
    new = place[:, :tokens], torch.full_like(length, tokens), start + length
    ops.gather_rows(
        *new,
        (staged["k"], staged["v"]),
        None,
        (target.columns["k"], target.columns["v"]),
        (pos[:, rows - tokens :], target.columns["pos"]),
        tokens,
    )
    _move(ops, new, {name: staged[name] for name in target.scales}, target, tokens)
    _move(ops, (place, length + tokens, start), extra, target, rows)
    target.length[layer] = length + tokens
    target.cap[layer] = caps


def _move(
    ops: Kernels,
    lists: tuple[Tensor, Tensor, Tensor],
    columns: Mapping[str, Tensor],
    target: Arena,
    most: int,
) -> None:
    """Move columns [H, N] into the target's. Scales and the policies' columns move in separate
    calls, so that a kernel is compiled for only two sets of dtypes."""
    to = [target.columns[name] for name in columns]
    ops.gather_columns(*lists, [*columns.values()], to, most)
