"""The decode step: attention of one token over the rows of each head, and the row that leaves a
head over its cap.

All functions work on the segments of an arena and never wait for the device: shapes do not depend
on values. Indices are int64. Rows that are not in use may hold any value, also NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.kernels.torch.int8 import from_codes


@dataclass(frozen=True, slots=True)
class Rows:
    """The heads of all layers at the end of a decode step, and which of their rows may leave.

    start, length, cap int64 [L, H]: a head's first row, its rows in use with the new one (one at
    least), and how many it may keep; pos int32 [R]: the position of each row; newest int64 []: the
    position of the new row. Only a head that is over its cap, length > cap, gives up a row.

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
class Hashing:
    """What a kernel of all layers needs for HashEvict (arXiv 2412.16187), which chooses victims by
    the query and writes the new row.

    matrices: each layer's projection, float32 [D, bits]; keyed: the probe is the key, not the
    queries; code [R]: the column of codes; length, cap and free_slot int64 [L, H], as in `Arena`;
    undo_rows: overwritten keys, values, positions and codes are copied there, [L * H, ...] each.
    sinks, recent and pinned: as in `Rows`.
    """

    matrices: Sequence[Tensor]
    keyed: bool
    code: Tensor
    length: Tensor
    cap: Tensor
    free_slot: Tensor
    undo_rows: tuple[Tensor, Tensor, Tensor, Tensor]
    sinks: int
    recent: int
    pinned: int


def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    length: Tensor,
    *,
    width: int,
    pos: Tensor | None = None,
    oldest: Tensor | None = None,
    logits: Tensor | None = None,
    lse: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    arrived: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One query per head over the head's own segment of rows.

    q [H, G, D]; k, v [R, D]; start, length int64 [H]: head h has rows start[h] .. start[h] +
    length[h] - 1. No length exceeds `width`. With `pos` int32 [R] and `oldest` int64 [], a query
    sees rows with pos >= oldest, one at least if the head has rows. With k_scale and v_scale
    float32 [R], k and v are int8: row r means k_scale[r] * k[r] and v_scale[r] * v[r].

    Returns the output [H, G, D] in q's dtype and the log-sum-exp [H, G] of the scaled logits in
    float32; 0 and -inf for a head without rows. Products are summed in float32; probabilities may
    be rounded to v's dtype before they are multiplied with v.

    Written in place where given: `lse` float32 [H, G], which is then the one that is returned;
    `logits` float32 [H, G, C], C >= width: the scaled logits of rows 0 .. length - 1 of each head,
    -inf where a row is not seen. Beyond a head's length they mean nothing.

    `arrived` int32 [H], zeros before and after: in it a GPU kernel counts which of its programs
    have finished. Not used here. A kernel that needs it allocates it if it is None.
    """
    index, live = in_use(start, length, width, len(k))
    seen = live if pos is None or oldest is None else live & (pos[index] >= oldest)
    keys, values = k[index].float(), v[index]
    if k_scale is not None and v_scale is not None:
        keys = keys * k_scale[index][..., None]
        values = from_codes(values, v_scale[index], q.dtype)
    keys = keys.masked_fill(~live[..., None], 0.0)
    values = values.masked_fill(~live[..., None], 0.0)
    x = torch.matmul(q.float(), keys.transpose(1, 2)) * (1.0 / math.sqrt(q.shape[-1]))
    x = x.masked_fill(~seen[:, None], -math.inf)
    if logits is not None:
        target = logits[..., :width]
        target.copy_(torch.where(live[:, None], x, target))
    sums = torch.logsumexp(x, -1)
    p = (x - sums.masked_fill(sums == -math.inf, 0.0)[..., None]).exp()
    out = torch.matmul(p.to(values.dtype), values).to(q.dtype)
    if lse is not None:
        sums = lse.copy_(sums)
    return out, sums


def lowest_step(
    scores: Tensor, allowed: Tensor, rows: Rows, accepted: Tensor, free_slot: Tensor
) -> None:
    """The row with the lowest score leaves: the end of a step of any policy that scores rows.

    scores, compared in float32, and allowed bool [L, H, C] or [L * H, C], C >= every length: column
    j is row start + j of the head, `allowed` whether the policy lets it leave. Beyond a head's
    length both may hold any value. rows: start, length, cap and pos are used. accepted bool []: if
    it is false, nothing is written.

    In place, free_slot int64 [L, H]: for a head that is over its cap, the row (index into the
    columns) with the lowest score among the allowed ones, of equal scores the one with the smallest
    position; the head's first row if no row is allowed; -1 for all other heads. A row whose score
    is NaN counts as not allowed.
    """
    wide = (*free_slot.shape, scores.shape[-1])
    scores, allowed = scores.view(wide), allowed.view(wide)
    index, live = in_use(rows.start, rows.length, wide[-1], len(rows.pos))
    allowed = allowed & live & ~scores.isnan()
    leaves = rows.start + lowest_row(scores, rows.pos[index].to(torch.int64), allowed)
    leaves = torch.where(rows.length > rows.cap, leaves, -1)
    free_slot.copy_(torch.where(accepted, leaves, free_slot))


def overwrite_step(
    scores: Tensor,
    allowed: Tensor,
    rows: Rows,
    free_slot: Tensor,
    slot: Tensor,
    columns: Mapping[str, Tensor],
    undo_rows: Mapping[str, Tensor],
) -> None:
    """The row with the lowest score makes room for the new one, before attention.

    scores and allowed [F, C], as in `lowest_step`, of the F heads of `rows`, free_slot and slot,
    whose shape is [F], or [L, H] with F = L * H. rows do not include the new row. A head is full if
    it has no free slot and length >= cap.

    In place, for full heads only: free_slot and slot int64, the row (index into the columns) that
    leaves, chosen as by `lowest_step`; undo_rows [F, ...] by name: a copy of this row, from columns
    [R, ...].
    """
    wide = (*free_slot.shape, scores.shape[-1])
    scores, allowed = scores.view(wide), allowed.view(wide)
    index, live = in_use(rows.start, rows.length, wide[-1], len(rows.pos))
    allowed = allowed & live & ~scores.isnan()
    victim = rows.start + lowest_row(scores, rows.pos[index].to(torch.int64), allowed)
    full = (free_slot < 0) & (rows.length >= rows.cap)
    row = torch.where(full, victim, index[..., 0]).flatten()
    for name, saved in undo_rows.items():
        mask = full.view(-1, *[1] * (saved.dim() - 1))
        saved.copy_(torch.where(mask, columns[name][row], saved))
    slot.copy_(torch.where(full, victim, slot))
    free_slot.copy_(torch.where(full, victim, free_slot))


def shown_positions(
    start: Tensor,
    length: Tensor,
    pos: Tensor,
    leaves_last: Tensor,
    out: Tensor,
    *,
    width: int,
    pinned: int,
    least: int,
) -> None:
    """The positions that a policy sees if some rows leave after all others (leaves_last).

    start, length int64 [L, H]; pos int32 [R]; leaves_last bool [R]; no length exceeds `width`. In
    place, out int32 [R]: the position of each row in use; -1 if it is below `pinned`; also -1 for
    rows of leaves_last, in heads with at least `least` other rows that are not pinned. `out` has no
    meaning for rows that are not in use.
    """
    index, live = in_use(start, length, width, len(pos))
    at = pos[index]
    may = live & (at >= pinned)
    others = may & ~leaves_last[index]
    enough = others.sum(-1, keepdim=True) >= least
    shown = at.masked_fill(~torch.where(enough, others, may), -1)
    # Padding is written to an extra row behind the last one.
    place = torch.where(live, index, len(pos)).flatten()
    out.copy_(out.new_zeros(len(pos) + 1).scatter_(0, place, shown.flatten())[:-1])


def unseen_rows(
    start: Tensor,
    length: Tensor,
    pos: Tensor,
    newest: Tensor,
    window: Tensor,
    accepted: Tensor,
    out: Tensor,
    *,
    width: int,
) -> None:
    """Rows outside the window of the next token, in layers with sliding-window attention.

    start, length int64 [L, H]; pos int32 [R]; newest int64 []: the position of the last token;
    window int64 [L]: how many positions a query of the layer sees; no length exceeds `width`. In
    place, out int64 [L, H]: the oldest of a head's rows that the token after `newest` does not see,
    of equal positions the first; -1 if it sees all rows, or if `accepted` bool [] is false.
    """
    index, live = in_use(start, length, width, len(pos))
    at = pos[index].to(torch.int64).masked_fill(~live, 1 << 40)
    oldest, j = at.min(-1)
    unseen = accepted & (oldest <= newest + 1 - window[:, None])
    out.copy_(torch.where(unseen, start + j, -1))


def in_use(start: Tensor, length: Tensor, width: int, rows: int) -> tuple[Tensor, Tensor]:
    """Rows of heads with start, length [...]: (index [..., width], live bool [..., width]).

    Padding repeats the head's last row, so it is harmless to write to it what that row also gets.
    For a head without rows it may be any row.
    """
    reach = torch.arange(width, device=start.device)
    last = (length[..., None] - 1).clamp(min=0)
    index = start[..., None] + torch.minimum(reach, last)
    return index.clamp(max=rows - 1), reach < length[..., None]


def lowest_row(scores: Tensor, at: Tensor, allowed: Tensor) -> Tensor:
    """The row with the lowest score, of equal ones that with the smallest position: int64 [...].

    scores and at (positions) [..., C], allowed bool [..., C]; 0 if no row is allowed.
    """
    scores = scores.to(torch.float32).masked_fill(~allowed, math.inf)
    tied = allowed & (scores <= scores.amin(-1, keepdim=True))
    return at.masked_fill(~tied, 1 << 40).argmin(-1)
