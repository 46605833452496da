"""Where the row of a new token goes, and writing it. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minikv.kernels.torch.int8 import codes_at, to_codes
from minikv.kernels.torch.layer import rotate


def append(
    key: Tensor,
    value: Tensor,
    slot: Tensor,
    position: Tensor,
    k: Tensor,
    v: Tensor,
    pos: Tensor,
    blank: Sequence[Tensor],
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write a new row into each head of one layer, in every column, in place.

    key, value [H, D], rotated by the network; slot int64 [H]: the rows to write, all different;
    position int64 []: goes into `pos` int32 [R]; k, v [R, D]; `blank`: further columns [R]
    (float32, int16, int32, int64 or bool), in which the row becomes 0. With k_scale and v_scale
    float32 [R], k and v are int8: codes and scales as `to_codes` makes them.
    """
    if k_scale is not None and v_scale is not None:
        (key, key_scale), (value, value_scale) = to_codes(key), to_codes(value)
        k_scale.index_copy_(0, slot, key_scale)
        v_scale.index_copy_(0, slot, value_scale)
    k.index_copy_(0, slot, key)
    v.index_copy_(0, slot, value)
    pos.index_copy_(0, slot, position.to(pos.dtype).expand(len(slot)))
    for column in blank:
        column.index_fill_(0, slot, 0)


def rotate_append(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot: Tensor,
    position: Tensor,
    k: Tensor,
    v: Tensor,
    pos: Tensor,
    blank: Sequence[Tensor],
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate the queries and keys of one token by `layer.rotate`, then `append` its rows.

    qkv [H * G + 2 * H, D]: queries, keys, values of H heads; cos, sin [1, 1, D]; slot [H] and what
    follows as in `append`. Returns the rotated queries [H, G, D] and keys [H, D].
    """
    heads, size = len(slot), qkv.shape[1]
    rotated = rotate(qkv[None, :-heads], cos, sin)[0]
    query, key = rotated[:-heads].view(heads, -1, size), rotated[-heads:]
    append(key, qkv[-heads:], slot, position, k, v, pos, blank, k_scale, v_scale)
    return query, key


def key_norms(
    k: Tensor,
    k_scale: Tensor | None,
    slot: Tensor,
    accepted: Tensor,
    norm: Tensor,
    dtype: torch.dtype,
) -> None:
    """Compute the norms of the keys in the new rows of a decode step, if it is `accepted` bool [].

    norm float32 [R], in place: the rows `slot` int64 [L, H] become the Euclidean norms of their
    keys. k [R, D]; with k_scale float32 [R] it has codes, and the keys are as `codes_at` makes them
    of `dtype`. If the step is not accepted, nothing changes, and `slot` may have no meaning.
    """
    at = slot.flatten() * accepted  # if not, a row that there is
    key = k[at] if k_scale is None else codes_at(k, k_scale, at, dtype)
    length = torch.linalg.vector_norm(key, dim=-1, dtype=torch.float32)
    norm.index_copy_(0, at, torch.where(accepted, length, norm[at]))


def advance(
    accepted: Tensor,
    start: Tensor,
    length: Tensor,
    cap: Tensor,
    free_slot: Tensor,
    position: Tensor,
    count: Tensor,
    slot: Tensor,
    overwritten: Tensor,
    *,
    before: bool,
) -> None:
    """Make the last decode step final, then choose the rows of the next one. In place, all heads.

    accepted bool []: the last step is to become final; start, length, cap, free_slot, count, slot
    int64 [L, H]; overwritten bool [L, H]; position int64 []: tokens so far.

    If `accepted`: length = count, position += 1, overwritten = false, accepted = false. After that,
    for either value: a head with free_slot >= 0 does not grow. With `before` (eviction before
    attention) a head with free_slot < 0 and length >= cap does not grow either, and gets
    overwritten = true; the others keep theirs. count = length, plus one where a head grows. slot =
    free_slot where that is >= 0, else start + length. If a head's victim is not chosen yet, its
    slot has no meaning.
    """
    # What can fail comes first, and all is written in one call, which no interrupt divides. So a
    # step is counted completely or not at all.
    final = torch.where(accepted, count, length)
    grows = free_slot < 0
    target = torch.where(grows, start + final, free_slot)
    marked = overwritten & ~accepted
    if before:
        evicts = grows & (final >= cap)
        marked = marked | evicts
        grows = grows & ~evicts
    used = final + grows
    now, done = position + accepted, torch.zeros_like(accepted)
    torch._foreach_copy_(
        (length, position, overwritten, slot, count, accepted),
        (final, now, marked, target, used, done),
    )
