"""The step kernels of single policies in torch: statistics and victims of a decode step.

One query per head was answered (`ragged_attention`); now a policy updates its statistics of all
rows, and every head that is over its cap gives up a row. `hash_append` chooses before attention.
Nothing here waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from minikv.kernels.torch.append import append
from minikv.kernels.torch.decode import Rows, in_use, lowest_row


def h2o_step(
    logits: Tensor,
    lse: Tensor,
    rows: Rows,
    go: Tensor,
    free_slot: Tensor,
    sums: Tensor,
    newest_rows: Tensor,
) -> None:
    """H2O (arXiv 2306.14048, section 4): the row with the lowest sum of attention leaves.

    logits float32 [L, H, G, C] and lse float32 [L, H, G]: what `ragged_attention` wrote in every
    layer, C >= every length; go bool []: where it is false, nothing is written. In place:

    p = the mean over G of exp(logit - lse), for every row in use;
    sums float32 [R] += p;
    free_slot int64 [L, H] = the row that leaves a head that is over its cap, -1 for other heads.

    The row that leaves is the candidate with the lowest sum (with p of this step), of equal sums
    the one with the smallest position. Candidates: let n = min(newest_rows, unpinned rows - 1), at
    least 1, newest_rows int64 [L, H]. They are the evictable rows (`Rows`) older than the n newest
    unpinned rows of the head; if there are none, all evictable rows.
    """
    index, live, p = _probabilities(logits, lse, rows)
    at, unpinned, candidates = _evictable(rows, index, live)
    total = _update(sums, index, sums[index] + p, go)
    ages = at.masked_fill(~unpinned, -1)
    count = torch.minimum(newest_rows, unpinned.sum(-1) - 1).clamp(min=1)
    edge = ages.sort(-1, descending=True).values.gather(-1, count[..., None] - 1)
    older = candidates & (ages < edge)
    candidates = torch.where(older.any(-1, keepdim=True), older, candidates)
    _evict(free_slot, rows, total, at, candidates, go)


def tova_step(
    logits: Tensor, lse: Tensor, rows: Rows, go: Tensor, free_slot: Tensor, *, layerwise: bool
) -> None:
    """TOVA (arXiv 2401.06104): the row with the lowest attention of this step leaves.

    Arguments, p and free_slot as in `h2o_step`; candidates are the evictable rows; there are no
    statistics. The score is p. With `layerwise` it is the mean of p over all unpinned rows of the
    same position in those heads of the layer that are over their cap, summed in float64 and rounded
    to float32.
    """
    index, live, p = _probabilities(logits, lse, rows)
    at, unpinned, candidates = _evictable(rows, index, live)
    if layerwise:
        over = (rows.length > rows.cap)[..., None]
        p = _mean_by_position(p, at.masked_fill(~(unpinned & over), -1))
    _evict(free_slot, rows, p, at, candidates, go)


def roco_step(
    logits: Tensor,
    lse: Tensor,
    rows: Rows,
    go: Tensor,
    free_slot: Tensor,
    sums: Tensor,
    squares: Tensor,
    count: Tensor,
    steady_rows: Tensor,
) -> None:
    """RoCo (arXiv 2402.06262, section 4.2): of the steady rows the one with the lowest mean leaves.

    Arguments, p and free_slot as in `h2o_step`. In place, all float32 [R], for every row in use:
    sums += p, squares += p * p, count += 1.

    With mean = sums / max(count, 1) and variance = max(squares / max(count, 1) - mean * mean, 0),
    candidates are the evictable rows whose variance is at most the n-th smallest among the
    evictable rows, n = min(steady_rows, evictable rows), at least 1; steady_rows int64 [L, H]. The
    candidate with the lowest mean leaves.
    """
    index, live, p = _probabilities(logits, lse, rows)
    at, _, evictable = _evictable(rows, index, live)
    total = _update(sums, index, sums[index] + p, go)
    power = _update(squares, index, squares[index] + p * p, go)
    seen = _update(count, index, count[index] + 1.0, go).clamp(min=1.0)
    mean = total / seen
    variance = (power / seen - mean.square()).clamp(min=0.0).masked_fill(~evictable, math.inf)
    nth = torch.minimum(steady_rows, evictable.sum(-1)).clamp(min=1)
    limit = variance.sort(-1).values.gather(-1, nth[..., None] - 1)
    _evict(free_slot, rows, mean, at, evictable & (variance <= limit), go)


def scissorhands_step(
    logits: Tensor,
    lse: Tensor,
    rows: Rows,
    go: Tensor,
    free_slot: Tensor,
    words: Sequence[Tensor],
    queries: Tensor,
    history: int,
    window: Tensor,
) -> None:
    """ScissorHands (arXiv 2305.17118, section 4): the row that most queries passed over leaves.

    Arguments, p and free_slot as in `h2o_step`. In place, for every row in use:

    words int64 [R] each, of which the low 32 bits are used: one shift register of `history` bits,
    words[0] first, the newest bit lowest. All bits move up by one, the highest bit of a word into
    the lowest of the next. The new bit is p < 1 / min(length, window), window int64 [L]. In the
    last word, bits from history - 32 * (words - 1) on are cleared.
    queries float32 [R] = min(queries + 1, history).

    Of the evictable rows, the one with the largest (set bits of its words) / max(queries, 1)
    leaves, in float32.
    """
    index, live, p = _probabilities(logits, lse, rows)
    at, _, evictable = _evictable(rows, index, live)
    seen = torch.minimum(rows.length, window[:, None]).to(torch.float32)
    carry = (p < 1.0 / seen[..., None]).to(torch.int64)
    below = torch.zeros_like(carry)
    for i, word in enumerate(words):
        old = word[index]
        bits = min(32, history - 32 * i)
        new = ((old << 1) & ((1 << bits) - 1)) | carry
        carry = (old >> 31) & 1
        below += _popcount(_update(word, index, new, go))
    seen_by = _update(queries, index, (queries[index] + 1.0).clamp(max=float(history)), go)
    _evict(free_slot, rows, -(below / seen_by.clamp(min=1.0)), at, evictable, go)


def hash_append(
    probe: Tensor,
    key: Tensor,
    value: Tensor,
    matrix: Tensor,
    start: Tensor,
    length: Tensor,
    cap: Tensor,
    free_slot: Tensor,
    position: Tensor,
    k: Tensor,
    v: Tensor,
    pos: Tensor,
    code: Tensor,
    undo_rows: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    width: int,
    sinks: int,
    recent: int,
    pinned: int,
) -> None:
    """HashEvict (arXiv 2412.16187, section 3): overwrite the row that is least like the queries.

    In place, one layer, before attention. probe [H, P, D]: what rows are compared with (the G
    rotated queries of the head, or its new key, P = 1); key, value [H, D] rotated; matrix float32
    [D, B]: the random projection, B at most 64 bits; start, length, cap, free_slot int64 [H],
    without the new row; position int64 []: of the new row; k, v [R, D]; pos int32 [R]; code int16,
    int32 or int64 [R]. No length exceeds `width`.

    The code of x is the sum over b of 2^b where (x . matrix[:, b] >= 0), in float32. A head with
    free_slot < 0 and length >= cap gives up a row: the evictable one whose code has the largest
    Hamming distance, summed over the P probes; of equal ones that with the smallest position.
    Evictable is as in `Rows` with newest = position - 1, the newest row that is there. The row is
    copied to `undo_rows` (k [H, D], v [H, D], pos [H], code [H], dtypes as the columns), and its
    index is written to `free_slot`. For other heads both stay as they are.

    Then the new row is written at free_slot[h] if that is >= 0, else at start[h] + length[h]: key,
    value, position and the code of its key.
    """
    index, live = in_use(start, length, width, len(k))
    full = (free_slot < 0) & (length >= cap)
    at = pos[index].to(torch.int64)
    unpinned = live & (at >= pinned)
    evictable = _may_leave(at, unpinned, position - 1, sinks, recent)
    other = code[index].to(torch.int64)
    apart = _popcount(_codes(probe, matrix)[:, :, None] ^ other[:, None]).sum(1)
    leaves = start + lowest_row(-apart, at, evictable)
    source = torch.where(full, leaves, start.clamp(max=len(k) - 1))
    for undo, column in zip(undo_rows, (k, v, pos, code), strict=True):
        chosen = full.view(-1, *[1] * (column.dim() - 1))
        undo.copy_(torch.where(chosen, column.index_select(0, source), undo))
    free_slot.copy_(torch.where(full, leaves, free_slot))
    slot = torch.where(free_slot >= 0, free_slot, start + length)
    append(key, value, slot, position, k, v, pos, ())
    code.index_copy_(0, slot, _codes(key, matrix).to(code.dtype))


def _probabilities(logits: Tensor, lse: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """`in_use` of all heads, and p [L, H, C]; padding repeats the last row's."""
    wide = logits.shape[-1]
    index, live = in_use(rows.start, rows.length, wide, len(rows.pos))
    local = (index - rows.start[..., None])[:, :, None].expand(logits.shape)
    p = (logits.gather(-1, local) - lse[..., None]).exp()
    return index, live, p.mean(2)


def _evictable(rows: Rows, index: Tensor, live: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of the rows at `index`, whether they are unpinned, and evictable: see `Rows`."""
    at = rows.pos[index].to(torch.int64)
    unpinned = live & (at >= rows.pinned)
    return at, unpinned, _may_leave(at, unpinned, rows.newest, rows.sinks, rows.recent)


def _may_leave(at: Tensor, unpinned: Tensor, newest: Tensor, sinks: int, recent: int) -> Tensor:
    inner = unpinned & (at >= sinks) & (at <= newest - recent)
    return inner | (~inner.any(-1, keepdim=True) & unpinned & (at < newest))


def _update(column: Tensor, index: Tensor, new: Tensor, go: Tensor) -> Tensor:
    """Write `new` to the rows of a column unless `go` is false. Returns what is there then."""
    new = torch.where(go, new, column[index])
    column.scatter_(0, index.flatten(), new.flatten())
    return new


def _evict(
    free_slot: Tensor, rows: Rows, scores: Tensor, at: Tensor, candidates: Tensor, go: Tensor
) -> None:
    leaves = rows.start + lowest_row(scores, at, candidates)
    chosen = torch.where(rows.length > rows.cap, leaves, -1)
    free_slot.copy_(torch.where(go, chosen, free_slot))


def _mean_by_position(values: Tensor, at: Tensor) -> Tensor:
    """Mean of values [L, H, C] over the rows of a layer with the same position at [L, H, C].

    Where `at` is -1 the result means nothing.
    """
    flat = at.flatten(1)
    ordered, order = flat.sort(dim=1, stable=True)
    new = torch.cat((ordered[:, :1] * 0, (ordered[:, 1:] != ordered[:, :-1]).long()), 1)
    group = torch.empty_like(order).scatter_(1, order, new.cumsum(1))
    sums = torch.zeros(flat.shape, dtype=torch.float64, device=flat.device)
    sums.scatter_add_(1, group, values.flatten(1).to(torch.float64))
    counts = torch.zeros_like(sums).scatter_add_(1, group, torch.ones_like(sums))
    return (sums / counts).gather(1, group).view(values.shape).to(values.dtype)


def _codes(x: Tensor, matrix: Tensor) -> Tensor:
    """int64 [...]: the signs of x [..., D] @ matrix [D, B] as the bits of one number."""
    signs = (x.to(torch.float32) @ matrix >= 0).to(torch.int64)
    return (signs << torch.arange(matrix.shape[1], device=x.device)).sum(-1)


def _popcount(x: Tensor) -> Tensor:
    """The number of set bits of each int64."""
    return _popcount32(x & 0xFFFFFFFF) + _popcount32((x >> 32) & 0xFFFFFFFF)


def _popcount32(x: Tensor) -> Tensor:
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24) & 0xFF
