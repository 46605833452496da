"""The decode step: attention of one token over the rows of each head, and the choice of the row
that leaves a head over its cap.

All functions work on the segments of an arena and never wait for the device: shapes do not depend
on values. Indices are int64. Unused rows may hold any value, even NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from minikv.kernels.int8 import from_codes


class Segments(NamedTuple):
    """The rows of one layer's heads, to attend to.

    k, v [R, D]; start, length int64 [H]: head h has rows start[h] .. start[h] + length[h] - 1. No
    length exceeds `width`. pos int32 [R]: the position of each row. oldest int64 []: if given, a
    query sees only rows with pos >= oldest, of which there is at least one if the head has rows.
    With k_scale and v_scale float32 [R], k and v are int8: row r means k_scale[r] * k[r] and
    v_scale[r] * v[r].
    """

    k: Tensor
    v: Tensor
    start: Tensor
    length: Tensor
    width: int
    pos: Tensor | None = None
    oldest: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """The heads of all layers at the end of a decode step, and which of their rows may leave.

    start, length, cap int64 [L, H]: a head's first row, its number of rows in use (at least one,
    the new row included), and how many it may keep; pos int32 [R]: the position of each row; newest
    int64 []: the position of the new row. Only a head over its cap, length > cap, loses a row.

    Rows with pos < pinned never leave. Of the others, a row is *evictable* if
    sinks <= pos <= newest - recent. If a head has no such row, then those with pos < newest are.
    """

    start: Tensor
    length: Tensor
    cap: Tensor
    pos: Tensor
    newest: Tensor
    sinks: int
    recent: int
    pinned: int


@dataclass(frozen=True, slots=True)
class NewRow:
    """The row of a new token in each head of one layer, for a kernel that first chooses the row to
    overwrite in a full head.

    query [H, G, D]; key and value [H, D]: of the token. start, length, cap, free_slot int64 [H]: as
    in `Arena`; the kernel writes the victims to free_slot. position int64 []: the token's. columns:
    those of the arena [R, ...], and bool "leaves_last" [R] if some rows leave after all others.
    width: no length exceeds it. pinned: positions below it never leave. shown int32 [R]: the
    positions as the policy sees them; columns["pos"] if no row leaves last. rotation: cosine and
    sine [1, 1, D], and the output for rotated queries [H, G, D]; None if queries and keys are
    already rotated. arrived int32 [H]: zeros before and after; a GPU kernel counts its finished
    programs in it.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    start: Tensor
    length: Tensor
    cap: Tensor
    free_slot: Tensor
    position: Tensor
    columns: Mapping[str, Tensor]
    width: int
    pinned: int
    shown: Tensor
    rotation: tuple[Tensor, Tensor, Tensor] | None = None
    arrived: Tensor | None = None


class HashRule(Protocol):
    """What a kernel needs to know about HashEvict (arXiv 2412.16187). matrix: the projection [D,
    bits] of a layer, float32, on the device of `like`. hash_with: "key" if the new key is the
    probe, otherwise the queries are. sinks and recent: as in `Rows`."""

    @property
    def sinks(self) -> int: ...

    @property
    def recent(self) -> int: ...

    @property
    def hash_with(self) -> str: ...

    def matrix(self, layer: int, like: Tensor) -> Tensor: ...


def ragged_attention(
    q: Tensor,
    rows: Segments,
    logits: Tensor | None = None,
    lse: Tensor | None = None,
    arrived: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One query per head, q [H, G, D], over the head's own segment of rows.

    Returns the output [H, G, D] in q's dtype and the log-sum-exp [H, G] of the scaled logits in
    float32; 0 and -inf for a head without rows. Products are summed in float32; probabilities may
    be rounded to v's dtype before they are multiplied with v.

    Written in place if given: `lse` float32 [H, G], which is then the returned tensor; `logits`
    float32 [H, G, C], C >= width: the scaled logits of rows 0 .. length - 1 of each head, -inf
    where a row is not seen. Beyond a head's length they are undefined.

    `arrived` int32 [H], zeros before and after: a GPU kernel counts its finished programs in it.
    Not used here. A kernel that needs it allocates it if it is None.
    """
    index, live = in_use(rows.start, rows.length, rows.width, len(rows.k))
    seen = live
    if rows.pos is not None and rows.oldest is not None:
        seen = live & (rows.pos[index] >= rows.oldest)
    keys, values = rows.k[index].float(), rows.v[index]
    if rows.k_scale is not None and rows.v_scale is not None:
        keys = keys * rows.k_scale[index][..., None]
        values = from_codes(values, rows.v_scale[index], q.dtype)
    keys = keys.masked_fill(~live[..., None], 0.0)
    values = values.masked_fill(~live[..., None], 0.0)
    x = torch.matmul(q.float(), keys.transpose(1, 2)) * (1.0 / math.sqrt(q.shape[-1]))
    x = x.masked_fill(~seen[:, None], -math.inf)
    if logits is not None:
        target = logits[..., : rows.width]
        target.copy_(torch.where(live[:, None], x, target))
    sums = torch.logsumexp(x, -1)
    p = (x - sums.masked_fill(sums == -math.inf, 0.0)[..., None]).exp()
    out = torch.matmul(p.to(values.dtype), values).to(q.dtype)
    if lse is not None:
        sums = lse.copy_(sums)
    return out, sums


def lowest(scores: Tensor, pos: Tensor, start: Tensor, over: Tensor, free_slot: Tensor) -> None:
    """In place, in the heads that are `over` bool [F]: free_slot int64 [F] becomes the row (index
    into the columns) with the lowest score, of equal scores the one with the smallest position; the
    head's first row if none may leave.

    scores float32 [F, N]: infinite for rows that may not leave, and so is NaN. pos int64 [F, N].
    start int64 [F]: the head's first row.
    """
    free = scores < math.inf
    tied = free & (scores <= scores.masked_fill(~free, math.inf).amin(1, keepdim=True))
    victim = start + pos.masked_fill(~tied, 1 << 40).argmin(1)
    free_slot.copy_(torch.where(over, victim, free_slot))


def in_use(start: Tensor, length: Tensor, width: int, rows: int) -> tuple[Tensor, Tensor]:
    """Rows of heads with start, length [...]: (index [..., width], live bool [..., width]).

    Padding repeats the head's last row, so writing that row's value to it is harmless.
    For a head without rows it may be any row.
    """
    reach = torch.arange(width, device=start.device)
    last = (length[..., None] - 1).clamp(min=0)
    index = start[..., None] + torch.minimum(reach, last)
    return index.clamp(max=rows - 1), reach < length[..., None]
