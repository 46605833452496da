"""Chooses where the row of a new token goes, and writes it. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minikv.kernels.int8 import to_codes
from minikv.kernels.layer.plain import rotate


class Slots(NamedTuple):
    """Where the new row of each head of one layer goes: row slot[h] of every column, slot int64
    [H], all different. position int64 [] is written to `pos` int32 [R]; k, v [R, D]; `blank`:
    further columns [R] (float32, int16, int32, int64 or bool), in which the row becomes 0. With
    k_scale and v_scale float32 [R], k and v are int8: codes and scales of `to_codes`.
    """

    slot: Tensor
    position: Tensor
    k: Tensor
    v: Tensor
    pos: Tensor
    blank: Sequence[Tensor]
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


def append(key: Tensor, value: Tensor, new: Slots) -> None:
    """Write a new row into each head of one layer, in every column, in place. key, value [H, D],
    rotated by the network."""
    slot, position, k, v, pos, blank, k_scale, v_scale = new
    if k_scale is not None and v_scale is not None:
        (key, key_scale), (value, value_scale) = to_codes(key), to_codes(value)
        k_scale.index_copy_(0, slot, key_scale)
        v_scale.index_copy_(0, slot, value_scale)
    k.index_copy_(0, slot, key)
    v.index_copy_(0, slot, value)
    pos.index_copy_(0, slot, position.to(pos.dtype).expand(len(slot)))
    for column in blank:
        column.index_fill_(0, slot, 0)


def rotate_append(qkv: Tensor, cos: Tensor, sin: Tensor, new: Slots) -> tuple[Tensor, Tensor]:
    """Rotate the queries and keys of one token by `layer.rotate`, then `append` its rows.

    qkv [H * G + 2 * H, D]: queries, keys, values of H heads; cos, sin [1, 1, D]. Returns the
    rotated queries [H, G, D] and keys [H, D].
    """
    heads, size = len(new.slot), qkv.shape[1]
    rotated = rotate(qkv[None, :-heads], cos, sin)[0]
    query, key = rotated[:-heads].view(heads, -1, size), rotated[-heads:]
    append(key, qkv[-heads:], new)
    return query, key


class Advancing(NamedTuple):
    """The heads of all layers between two steps: int64 [L, H]; position int64 []: tokens so far.
    used: rows in use, including the new one of the step that ends."""

    start: Tensor
    length: Tensor
    cap: Tensor
    free_slot: Tensor
    position: Tensor
    used: Tensor
    slot: Tensor


def advance(heads: Advancing, *, before: bool) -> None:
    """Count the token of a decode step, then choose the rows of the next one, in place.

    length = used, position += 1. Then a head with free_slot >= 0 does not grow. With `before`
    (eviction before attention) a full head, length >= cap, does not grow either. used = length,
    plus one where a head grows. slot = free_slot where that is >= 0, otherwise start + length,
    which is meaningless for a full head.
    """
    start, length, cap, free_slot, position, used, slot = heads
    length.copy_(used)
    position.add_(1)
    grows = free_slot < 0
    slot.copy_(torch.where(grows, start + length, free_slot))
    if before:
        grows &= length < cap
    used.add_(grows)
