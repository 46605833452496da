"""Every operation in plain torch: the specification, and the path on a CPU.

Shapes use the project's letters: H KV heads, G query heads per KV head, D head size, T new rows,
N cached rows, W observation rows. Logits are scaled by 1/sqrt(D); softmax is in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_LOGITS = 1 << 22  # most logits, or entries of a mask, of one block
_OBSERVED = 1 << 19  # logits of one block of an observation: 2 MiB


def rows_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention over rows that all queries see (or causally: query i sees rows 0..i).

    q [H, G, T, D], k and v [H, N, D], strides free except the last. Returns the mixed values
    [H, G, T, D] in q's dtype and the log-sum-exp of the logits [H, G, T] in float32, by which
    parts are joined (`merge`). Never holds T x N logits.
    """
    if q.device.type == "cpu":
        return _flash(q, k, v, None, causal=causal)
    found = _library(q, k, v, causal) if q.device.type == "cuda" else None
    if found is not None:
        return found
    keys = torch.arange(k.shape[1], device=q.device)
    mixed, sums = [], []
    for part, begin in _row_blocks(q, q.shape[0] * q.shape[1] * k.shape[1]):
        mask = None
        if causal:
            at = torch.arange(begin, begin + part.shape[2], device=q.device)
            mask = (keys <= at[:, None])[None]
        out, lse = _masked(part, k, v, mask)
        mixed.append(out)
        sums.append(lse)
    return torch.cat(mixed, 2), torch.cat(sums, 2)


def last_rows_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of the last T of N rows over all of them: query i sees rows 0 .. N - T + i.

    Shapes and results as in `rows_attention`.
    """
    earlier = k.shape[1] - q.shape[2]
    parts = [rows_attention(q, k[:, earlier:], v[:, earlier:], causal=True)]
    if earlier:
        parts.append(rows_attention(q, k[:, :earlier], v[:, :earlier]))
    return merge(parts), total(parts)


def visible_attention(
    q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, window: int | None
) -> tuple[Tensor, Tensor]:
    """Attention by positions: query i sees row j iff 0 <= q_pos[i] - k_pos[h, j] < window.

    q [H, G, T, D]; k, v [H, N, D]; q_pos [T]; k_pos [H or 1, N], -1 where there is no row. Returns
    as `rows_attention`; a query that sees nothing gets zeros and a log-sum-exp of -inf.
    """
    flash = q.device.type == "cpu"
    missing = k_pos[..., None] < 0
    if flash and bool(missing.any()):  # a mask that is added does not hide NaN
        k, v = k.masked_fill(missing, 0.0), v.masked_fill(missing, 0.0)
    wide = len(k_pos) if flash else q.shape[0] * q.shape[1]
    mixed, sums = [], []
    for part, begin in _row_blocks(q, wide * k.shape[1]):
        at = q_pos[begin : begin + part.shape[2]]
        out, lse = (_flash if flash else _masked)(part, k, v, _visible(at, k_pos, window))
        mixed.append(out)
        sums.append(lse)
    return torch.cat(mixed, 2), torch.cat(sums, 2)


def total(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The log-sum-exp over all parts: [(mixed [..., D], log-sum-exp [...])] -> [...]."""
    return torch.logsumexp(torch.stack([lse for _, lse in parts]), 0)


def merge(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Join attention over disjoint sets of rows: [(mixed [..., D], log-sum-exp [...])] -> mixed.

    A part that saw nothing has log-sum-exp -inf and weighs nothing; at least one saw something.
    """
    if len(parts) == 1:
        return parts[0][0]
    whole = total(parts)
    joined = torch.empty_like(parts[0][0])
    for h in range(len(joined)):  # head by head: the float32 copies stay small
        mixed = parts[0][0][h] * (parts[0][1][h] - whole[h]).exp()[..., None]
        for out, lse in parts[1:]:
            mixed = mixed.addcmul_(out[h], (lse[h] - whole[h]).exp()[..., None])
        joined[h] = mixed
    return joined


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """One query per head over its rows.

    q [H, G, D]; k, v [H, N, D]; seen bool [H, N] or None for all; scales: those of k and v [H, N]
    each, where they are int8 (`to_codes`). Returns the mixed values [H, G, D] and the probabilities
    [H, G, N] in float32.
    """
    kind = q.dtype
    if scales is not None:
        q, k, v = _with_codes(q, k, v)
    if q.dtype == torch.float32:
        logits = torch.matmul(q, k.transpose(1, 2))
    else:  # on a CPU about 15 times as fast in bfloat16 as the product above
        logits = torch.matmul(k, q.transpose(1, 2)).transpose(1, 2).float()
    logits = logits * (1.0 / math.sqrt(q.shape[-1]))
    if scales is not None:
        logits = logits * scales[0][:, None]
    if seen is not None:
        logits = logits.masked_fill(~seen[:, None], -math.inf)
    probabilities = logits.softmax(-1)
    weights = probabilities if scales is None else probabilities * scales[1][:, None]
    return torch.matmul(weights.to(v.dtype), v).to(kind), probabilities


def joint_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """One query per head over rows that belong to different heads, in one product for all.

    q [H, G, D]; k, v [n, D], all finite; seen bool [H * G, n]: the rows of a query's own head that
    it sees, one at least; scales: those of k and v [n] each, where they are int8 (`to_codes`).
    Returns the mixed values [H, G, D] and each row's probability [n] in float32, the mean over the
    G queries of its head. Computes H times the products needed, which beats a loop over heads as
    long as H * G * n is small.
    """
    heads, group, size = q.shape
    kind = q.dtype
    if scales is not None:
        q, k, v = _with_codes(q, k, v)
    query = q.reshape(heads * group, size)
    if q.dtype == torch.float32:
        logits = torch.matmul(query, k.T)
    else:  # see `decode_attention`
        logits = torch.matmul(k, query.T).T.float()
    logits = logits.mul_(1.0 / math.sqrt(size))
    if scales is not None:
        logits *= scales[0]
    p = torch.where(seen, logits, -math.inf).softmax(-1)
    weights = p if scales is None else p * scales[1]
    mixed = torch.matmul(weights.to(v.dtype), v).view(heads, group, size)
    return mixed.to(kind), p.sum(0).mul_(1.0 / group)


def _with_codes(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and the codes of keys and values as numbers that can be multiplied with them. An
    int8 is exact in bfloat16; scales come later, to sums that float16 would not hold."""
    kind = torch.float32 if q.dtype == torch.float16 else q.dtype
    return q.to(kind), k.to(kind), v.to(kind)


def to_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows x [..., D] as int8 [..., D] and a float32 scale [...]: x is nearly codes * scale.

    Symmetric, a scale per row, so that the largest entry becomes 127; a row of zeros has scale 1.
    """
    most = x.abs().amax(-1).to(torch.float32)
    scale = torch.where(most == 0, 1.0, most / 127.0)  # NaN stays NaN
    codes = (x / scale[..., None]).round_().clamp_(-127, 127)
    return codes.to(torch.int8), scale


def from_codes(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What `to_codes` made of rows, as numbers [..., D] again."""
    into = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    return torch.mul(codes, scale[..., None], out=into)  # without a copy in float32


Part = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
"""Keys [H, n, D] and their positions [H or 1, n], -1 where there is no row; or all rows [R, D], the
positions, and which of the rows they are, int64 [H, n]."""


def observe(
    q: Tensor, q_pos: Tensor, parts: Sequence[Part], window: int | None
) -> tuple[Tensor, Tensor]:
    """What the last rows of a prompt look at.

    q [W, H, G, D]; q_pos [W], never falling; N is the rows of all parts together. Visibility as in
    `visible_attention`; every query sees a row. Returns, in float32, the probabilities summed over
    the W rows [H, G, N], and the sum over the rows of the squared mean over G [H, N].
    """
    _, heads, group, _ = q.shape
    total = sum(part[1].shape[1] for part in parts)
    mass = q.new_empty((heads, group, total), dtype=torch.float32)
    squares = q.new_empty((heads, total), dtype=torch.float32)
    for h, begin, _, p in _looks(q, q_pos, parts, window):
        end = begin + p.shape[-1]
        mass[h, :, begin:end] = p.sum(1)
        squares[h, begin:end] = p.mean(0).square_().sum(0)
    return mass, squares


def below_uniform(q: Tensor, q_pos: Tensor, parts: Sequence[Part], window: int | None) -> Tensor:
    """Which of the last rows of a prompt gave a row less than an even share: int64 [H, N].

    Arguments as `observe` takes them, W at most 32. Bit i is set if the i-th query from the end
    could see the row and gave it, in the mean over G, less than 1 / (rows that it saw).
    """
    rows, heads = q.shape[:2]
    bits = q.new_zeros((heads, sum(part[1].shape[1] for part in parts)), dtype=torch.int64)
    seen = torch.zeros((heads, rows), device=q.device)
    for part in parts:
        seen += _visible(q_pos, part[1], window).sum(-1)
    place = 1 << torch.arange(rows - 1, -1, -1, device=q.device)
    for h, begin, at, p in _looks(q, q_pos, parts, window):
        low = (p.mean(0) < 1.0 / seen[h, :, None]) & _visible(q_pos, at[None], window)[0]
        bits[h, begin : begin + p.shape[-1]] = (low * place[:, None]).sum(0)
    return bits


def _looks(
    q: Tensor, q_pos: Tensor, parts: Sequence[Part], window: int | None
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Head, first row, positions [n] and probabilities [G, W, n] of one block of rows after the
    other; arguments as `observe` takes them."""
    rows, heads, group, size = q.shape
    # Elsewhere than on the host it costs more to ask whether all is seen than to mask.
    earliest = int(q_pos[0]) if window is None and q.device.type == "cpu" else -1
    for h in range(heads):
        query = q[:, h].float().transpose(0, 1) * (1.0 / math.sqrt(size))  # [G, W, D]

        def logits(k: Tensor, at: Tensor, query: Tensor = query) -> Tensor:
            found = torch.matmul(query, k.float().T)  # [G, W, n]
            if earliest >= 0 and int(at.min()) >= 0 and int(at.max()) <= earliest:
                return found  # every query sees every row
            return found.masked_fill_(~_visible(q_pos, at[None], window), -math.inf)

        step = max(1, _OBSERVED // (group * rows))
        blocks = [
            (k[lo : lo + step], at[lo : lo + step])
            for k, at in (_of_head(part, h) for part in parts)
            for lo in range(0, len(k), step)
        ]
        # Few blocks are kept; many are computed twice, for the sum and for the probabilities.
        kept = [logits(*block) for block in blocks] if len(blocks) <= 2 else None
        sums = [torch.logsumexp(x, -1) for x in kept or map(logits, *zip(*blocks, strict=True))]
        lse = torch.logsumexp(torch.stack(sums), 0)[..., None]  # [G, W, 1]
        begin = 0
        for i, block in enumerate(blocks):
            p = (kept[i] if kept else logits(*block)).sub_(lse).exp_()
            yield h, begin, block[1], p
            begin += p.shape[-1]


def add_columns(
    mass: Tensor,
    squares: Tensor,
    q: Tensor,
    lse: Tensor,
    q_pos: Tensor,
    k: Tensor,
    k_pos: Tensor,
    window: int | None,
    index: Tensor | None = None,
) -> None:
    """Add what T queries give each row, in place, never holding T x N probabilities.

    mass [H, G, N] and squares [H, N] float32 as `observe` returns them; q [H, G, T, D]; lse
    [H, G, T], the log-sum-exp over all rows that the queries see, those in other parts too;
    q_pos [T], never falling; k, k_pos and index are one `Part`.
    """
    heads, group, rows, size = q.shape
    step = max(1, _OBSERVED // (group * rows))
    part: Part = (k, k_pos) if index is None else (k, k_pos, index)
    for h in range(heads):
        query = q[h].float() * (1.0 / math.sqrt(size))
        keys, places = _of_head(part, h)
        for lo in range(0, len(keys), step):
            hi = min(lo + step, len(keys))
            logits = torch.matmul(query, keys[lo:hi].float().T)
            at = places[lo:hi]
            p = logits.sub_(lse[h, ..., None]).exp_()
            p.masked_fill_(~_visible(q_pos, at[None], window), 0.0)
            mass[h, :, lo:hi] += p.sum(1)
            squares[h, lo:hi] += p.mean(0).square_().sum(0)


def _of_head(part: Part, h: int) -> tuple[Tensor, Tensor]:
    """The keys [n, D] of one head of a part, and their positions [n]."""
    at = part[1][h if len(part[1]) > 1 else 0]
    return part[0][h if len(part) == 2 else part[2][h]], at


def _placed(part: Part) -> tuple[Tensor, Tensor]:
    """The keys of a part as [H, n, D]."""
    return part if len(part) == 2 else (part[0][part[2]], part[1])


def _visible(q_pos: Tensor, k_pos: Tensor, window: int | None) -> Tensor:
    """[H or 1, T, N] from q_pos [T] and k_pos [H or 1, N]."""
    distance = q_pos[None, :, None] - k_pos[:, None, :]
    seen = (distance >= 0) & (k_pos >= 0)[:, None, :]
    return seen if window is None else seen & (distance < window)


def _row_blocks(q: Tensor, width: int) -> list[tuple[Tensor, int]]:
    """Cut the queries so that a block holds few numbers; `width` is what one row needs."""
    size = max(1, _LOGITS // max(1, width))
    return [(q[:, :, lo : lo + size], lo) for lo in range(0, q.shape[2], size)]


def _flash(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """As `_masked`, by the kernel behind scaled_dot_product_attention on a CPU, called directly for
    its log-sum-exp. The expanded heads have stride 0, so nothing is copied. k and v are finite.
    """
    heads, group, rows, size = q.shape
    shape = (heads, group, k.shape[1], size)
    bias = None
    if mask is not None:
        bias = q.new_zeros(mask.shape).masked_fill_(~mask, -math.inf)
        bias = bias[:, None].expand(heads, group, rows, -1)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k[:, None].expand(shape), v[:, None].expand(shape), 0.0, causal, attn_mask=bias
    )
    if mask is not None:
        blind = ~mask.any(2)[:, None]
        out = out.masked_fill(blind[..., None], 0.0)
        lse = lse.masked_fill(blind, -math.inf)
    return out, lse


def _library(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor] | None:
    """`rows_attention` by the kernels behind scaled_dot_product_attention on CUDA, called directly
    for their log-sum-exp; None where neither takes the dtype and head size."""
    heads, group, rows, size = q.shape
    ops = torch.ops.aten
    if (size * q.element_size()) % 16 or size > 256 or q.dtype == torch.float64:
        return None
    modern = torch.cuda.get_device_capability(q.device) >= (8, 0)
    if q.dtype == torch.bfloat16 and not modern:
        return None
    if q.dtype != torch.float32 and modern:
        # It knows grouped heads: query head i goes with KV head i // G.
        out = ops._scaled_dot_product_flash_attention(
            q.flatten(0, 1)[None], k[None], v[None], 0.0, causal
        )
    else:  # it wants a key head for every query head: strides of 0, nothing is copied
        shape = (heads, group, k.shape[1], size)
        out = ops._scaled_dot_product_efficient_attention(
            q, k[:, None].expand(shape), v[:, None].expand(shape), None, True, 0.0, causal
        )
    # The second pads the log-sum-exp to a multiple of 32 queries.
    return out[0].view(q.shape), out[1][..., :rows].reshape(heads, group, rows)


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """q [H, G, T, D] over k, v [H, N, D] under mask [H or 1, T, N]; empty rows give 0 and -inf."""
    logits = torch.matmul(q, k[:, None].transpose(2, 3)).float() * (1.0 / math.sqrt(q.shape[-1]))
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None], -math.inf)
        # A row that nobody sees may hold anything, NaN too, and 0 x NaN is not 0.
        v = v.masked_fill(~mask.any(1)[..., None], 0.0)
    lse = torch.logsumexp(logits, -1)
    p = (logits - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
    return torch.matmul(p.to(v.dtype), v[:, None]), lse


# -- the decode step on the device --------------------------------------------------------------
#
# Everything below is free of host synchronisation: shapes never depend on values. Indices are
# int64. A row is at least written where it is in use; elsewhere columns hold anything, NaN too.


@dataclass(frozen=True, slots=True)
class Rows:
    """The heads of all layers at the end of a step, and which of their rows may leave.

    start, length, cap int64 [L, H]: a head's first row, its rows in use with the newcomer (one at
    least), and how many it may keep; pos int32 [R]: the position of each row; newest int64 []:
    the newcomer's position. A head is *over* if length > cap; only such a head gives up a row.

    A row is *shown* if pos >= pinned. A shown row is *free* if sinks <= pos <= newest - recent. If
    a head has no such row, its shown rows with pos < newest are free.
    """

    start: Tensor
    length: Tensor
    cap: Tensor
    pos: Tensor
    newest: Tensor
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
) -> tuple[Tensor, Tensor]:
    """One query per head over a segment of rows of its own.

    q [H, G, D]; k, v [R, D]; head h has the rows start[h] .. start[h] + length[h] - 1, int64 [H];
    no length exceeds `width`. With `pos` int32 [R] and `oldest` int64 [] a row is seen if
    pos >= oldest; a head that has rows sees one at least. With k_scale and v_scale float32 [R] k
    and v are int8, and row r stands for k_scale[r] * k[r] and v_scale[r] * v[r].

    Returns the mixed values [H, G, D] in q's dtype and the log-sum-exp [H, G] in float32 (natural
    logarithm of the scaled logits); 0 and -inf for a head without rows. Products are summed in
    float32; probabilities may be rounded to v's dtype before they meet v.

    Written in place where given: `lse` float32 [H, G], which is then what is returned; `logits`
    float32 [H, G, C], C >= width: the scaled logits of rows 0 .. length - 1 of each head, -inf
    where a row is not seen; what lies beyond a head's length is left as it is.
    """
    index, live = _in_use(start, length, width, len(k))
    seen = live if pos is None or oldest is None else live & (pos[index] >= oldest)
    keys, values = k[index].float(), v[index]
    if k_scale is not None and v_scale is not None:
        keys = keys * k_scale[index][..., None]
        values = from_codes(values, v_scale[index], q.dtype)
    keys = keys.masked_fill(~live[..., None], 0.0)
    values = values.masked_fill(~live[..., None], 0.0)
    found = torch.matmul(q.float(), keys.transpose(1, 2)) * (1.0 / math.sqrt(q.shape[-1]))
    found = found.masked_fill(~seen[:, None], -math.inf)
    if logits is not None:
        into = logits[..., :width]
        into.copy_(torch.where(live[:, None], found, into))
    sums = torch.logsumexp(found, -1)
    p = (found - sums.masked_fill(sums == -math.inf, 0.0)[..., None]).exp()
    mixed = torch.matmul(p.to(values.dtype), values).to(q.dtype)
    if lse is not None:
        sums = lse.copy_(sums)
    return mixed, sums


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
    """Write a newcomer into a row of each head, in every column. In place, one layer.

    key, value [H, D], rotated (rotation stays with the network, whose `Attend` hands over rotated
    keys: the query needs it too, before anything else); slot int64 [H]: rows, all different;
    position int64 []: what goes into `pos` int32 [R]; k, v [R, D]; `blank`: further columns [R]
    (float32, int16, int32, int64 or bool), which become 0 there. With k_scale and v_scale float32
    [R] k and v are int8: codes and scales are what `to_codes` makes of key and value.
    """
    if k_scale is not None and v_scale is not None:
        (key, scale), (value, other) = to_codes(key), to_codes(value)
        k_scale.index_copy_(0, slot, scale)
        v_scale.index_copy_(0, slot, other)
    k.index_copy_(0, slot, key)
    v.index_copy_(0, slot, value)
    pos.index_copy_(0, slot, position.to(pos.dtype).expand(len(slot)))
    for column in blank:
        column.index_fill_(0, slot, 0)


def advance(
    go: Tensor,
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
    """Make the last step final, then decide where the next one's newcomers go. In place, all heads.

    go bool []; start, length, cap, free_slot, count, slot int64 [L, H]; overwritten bool [L, H]; position
    int64 [].

    If go: length = count, position += 1, overwritten = false, go = false. Then, whatever go was: a head
    with free_slot >= 0 does not grow; with `before` (victims leave before attention) one without a free_slot
    and with length >= cap does not either, and is overwritten = true (others keep overwritten). count = length,
    one more where a head grows; slot = free_slot if that is >= 0, else start + length, which means
    nothing for a head whose victim is still to be chosen.
    """
    # What may fail comes first: then a step is counted or it is not.
    final = torch.where(go, count, length)
    grows = free_slot < 0
    into = torch.where(grows, start + final, free_slot)
    left = overwritten & ~go
    if before:
        asked = grows & (final >= cap)
        left = left | asked
        grows = grows & ~asked
    used = final + grows
    length.copy_(final)
    position.add_(go)
    overwritten.copy_(left)
    slot.copy_(into)
    count.copy_(used)
    go.zero_()


def hash_append(
    probe: Tensor,
    key: Tensor,
    value: Tensor,
    matrix: Tensor,
    start: Tensor,
    length: Tensor,
    cap: Tensor,
    hole: Tensor,
    position: Tensor,
    k: Tensor,
    v: Tensor,
    pos: Tensor,
    code: Tensor,
    spare: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    width: int,
    sinks: int,
    recent: int,
    pinned: int,
) -> None:
    """HashEvict (arXiv 2412.16187, section 3): choose who leaves by SimHash, then write the
    newcomer. In place, one layer, before attention.

    probe [H, P, D]: what rows are compared with (the G rotated queries of the head, or its new
    key, P = 1); key, value [H, D] rotated; matrix float32 [D, B], at most 64 bits B; start,
    length, cap, hole int64 [H], the newcomer not counted; position int64 []: the newcomer's; k, v
    [R, D]; pos int32 [R]; code int16, int32 or int64 [R]. No length exceeds `width`.

    The code of x is sum over b of 2^b where (x . matrix[:, b] >= 0), in float32. A head with
    hole < 0 and length >= cap gives up a row: the free one whose code has the largest Hamming
    distance, summed over the P probes; of equal ones that with the smallest pos. Free is as in
    `Rows` with newest = position - 1 (the newest row that is there already). Before it is
    overwritten, the row is copied to `spare` (k [H, D], v [H, D], pos [H], code [H], dtypes as the
    columns), and its index is written to `hole`. Other heads leave hole and spare as they are.

    Then the newcomer goes to row hole[h] if hole[h] >= 0, else to start[h] + length[h]: key,
    value, position and the code of its key.
    """
    index, live = _in_use(start, length, width, len(k))
    asked = (hole < 0) & (length >= cap)
    at = pos[index].to(torch.int64)
    shown = live & (at >= pinned)
    free = _free(at, shown, position - 1, sinks, recent)
    other = code[index].to(torch.int64)
    apart = _bits(_codes(probe, matrix)[:, :, None] ^ other[:, None]).sum(1)
    leaves = start + _oldest_of_lowest(-apart, at, free)
    source = torch.where(asked, leaves, start.clamp(max=len(k) - 1))
    for saved, column in zip(spare, (k, v, pos, code), strict=True):
        chosen = asked.view(-1, *[1] * (column.dim() - 1))
        saved.copy_(torch.where(chosen, column.index_select(0, source), saved))
    hole.copy_(torch.where(asked, leaves, hole))
    slot = torch.where(hole >= 0, hole, start + length)
    append(key, value, slot, position, k, v, pos, ())
    code.index_copy_(0, slot, _codes(key, matrix).to(code.dtype))


def h2o_step(
    logits: Tensor, lse: Tensor, rows: Rows, go: Tensor, hole: Tensor, sums: Tensor, young: Tensor
) -> None:
    """H2O at the end of a step (arXiv 2306.14048, section 4): statistics and victims of all heads.

    logits float32 [L, H, G, C] and lse float32 [L, H, G] as `ragged_attention` left them for
    every layer, C >= every length; go bool []: where it is false, nothing is written. In place:

    p = mean over G of exp(logit - lse), for every row in use;
    sums float32 [R] += p;
    hole int64 [L, H] = the index of the row that leaves, for a head that is over; else -1.

    It is the candidate with the lowest sum (p of this step included), of equal ones the one with
    the smallest pos. Candidates: let n = min(young, shown rows - 1), at least 1, with young int64
    [L, H]; the free rows with pos < the n-th largest pos among the head's shown rows; if there
    are none, all free rows.
    """
    index, live, p = _weights(logits, lse, rows)
    at, shown, free = _judged(rows, index, live)
    total = _into(sums, index, sums[index] + p, go)
    ages = at.masked_fill(~shown, -1)
    count = torch.minimum(young, shown.sum(-1) - 1).clamp(min=1)
    edge = ages.sort(-1, descending=True).values.gather(-1, count[..., None] - 1)
    older = free & (ages < edge)
    free = torch.where(older.any(-1, keepdim=True), older, free)
    _give_up(hole, rows, total, at, free, go)


def tova_step(
    logits: Tensor, lse: Tensor, rows: Rows, go: Tensor, hole: Tensor, *, layerwise: bool
) -> None:
    """TOVA at the end of a step (arXiv 2401.06104): victims of all heads; there are no statistics.

    Arguments, p and hole as for `h2o_step`; candidates are the free rows. The score is p; with
    `layerwise` it is, for a shown row of a head that is over, the mean of p over all shown rows
    of the same position in those heads of the same layer that are over (itself included), summed
    in float64 and rounded to float32.
    """
    index, live, p = _weights(logits, lse, rows)
    at, shown, free = _judged(rows, index, live)
    if layerwise:
        over = (rows.length > rows.cap)[..., None]
        p = _mean_by_position(p, at.masked_fill(~(shown & over), -1))
    _give_up(hole, rows, p, at, free, go)


def roco_step(
    logits: Tensor,
    lse: Tensor,
    rows: Rows,
    go: Tensor,
    hole: Tensor,
    sums: Tensor,
    squares: Tensor,
    count: Tensor,
    keep: Tensor,
) -> None:
    """RoCo at the end of a step (arXiv 2402.06262, section 4.2): statistics and victims.

    Arguments, p and hole as for `h2o_step`. In place, all float32 [R], for every row in use:
    sums += p, squares += p * p, count += 1.

    With mean = sums / max(count, 1) and spread = max(squares / max(count, 1) - mean * mean, 0),
    candidates are the free rows whose spread is at most the n-th smallest spread among the free
    rows, n = min(keep, free rows), at least 1, with keep int64 [L, H]. The lowest mean leaves.
    """
    index, live, p = _weights(logits, lse, rows)
    at, _, free = _judged(rows, index, live)
    total = _into(sums, index, sums[index] + p, go)
    power = _into(squares, index, squares[index] + p * p, go)
    seen = _into(count, index, count[index] + 1.0, go).clamp(min=1.0)
    mean = total / seen
    spread = (power / seen - mean.square()).clamp(min=0.0).masked_fill(~free, math.inf)
    nth = torch.minimum(keep, free.sum(-1)).clamp(min=1)
    steady = spread.sort(-1).values.gather(-1, nth[..., None] - 1)
    _give_up(hole, rows, mean, at, free & (spread <= steady), go)


def scissorhands_step(
    logits: Tensor,
    lse: Tensor,
    rows: Rows,
    go: Tensor,
    hole: Tensor,
    words: Sequence[Tensor],
    queries: Tensor,
    history: int,
    window: Tensor,
) -> None:
    """ScissorHands at the end of a step (arXiv 2305.17118, section 4): statistics and victims.

    Arguments, p and hole as for `h2o_step`. In place, for every row in use:

    words int64 [R] each, of which the low 32 bits are used: one shift register of `history` bits,
    words[0] first, its lowest bit the newest. All move up by one, the highest bit of a word into
    the lowest of the next; the new bit is p < 1 / min(length, window), with window int64 [L]; of
    the last word, bits from history - 32 * (words - 1) on are cleared.
    queries float32 [R] = min(queries + 1, history).

    Candidates are the free rows; the one with the largest (set bits of its words) /
    max(queries, 1) leaves, in float32.
    """
    index, live, p = _weights(logits, lse, rows)
    at, _, free = _judged(rows, index, live)
    seen = torch.minimum(rows.length, window[:, None]).to(torch.float32)
    carry = (p < 1.0 / seen[..., None]).to(torch.int64)
    below = torch.zeros_like(carry)
    for i, word in enumerate(words):
        old = word[index]
        bits = min(32, history - 32 * i)
        new = ((old << 1) & ((1 << bits) - 1)) | carry
        carry = (old >> 31) & 1
        below += _bits(_into(word, index, new, go))
    asked = _into(queries, index, (queries[index] + 1.0).clamp(max=float(history)), go)
    _give_up(hole, rows, -(below / asked.clamp(min=1.0)), at, free, go)


def lowest_step(scores: Tensor, allowed: Tensor, rows: Rows, go: Tensor, free_slot: Tensor) -> None:
    """Victims of all heads by scores that were computed elsewhere: the lowest leaves. In place.

    scores float32 and allowed bool [L, H, C], of which a head's first `length` rows mean something.
    Where go is true, free_slot int64 [L, H] becomes, for a head that is over its cap, the index of
    the allowed row of lowest score, of equal ones the one with the smallest pos, and without an
    allowed row the head's first; -1 for the other heads.
    """
    index, live = _in_use(rows.start, rows.length, scores.shape[-1], len(rows.pos))
    at = rows.pos[index].to(torch.int64)
    _give_up(free_slot, rows, scores, at, allowed & live, go)


def _in_use(start: Tensor, length: Tensor, width: int, rows: int) -> tuple[Tensor, Tensor]:
    """Rows of heads with start, length [...]: (index [..., width], live [..., width] bool).

    Padding points at the head's last row, so that writing there what is written to that row is
    no harm; a head without rows points at any row.
    """
    reach = torch.arange(width, device=start.device)
    last = (length[..., None] - 1).clamp(min=0)
    index = start[..., None] + torch.minimum(reach, last)
    return index.clamp(max=rows - 1), reach < length[..., None]


def _weights(logits: Tensor, lse: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """`_in_use` of all heads, and p [L, H, C]; padding repeats the last row's."""
    wide = logits.shape[-1]
    index, live = _in_use(rows.start, rows.length, wide, len(rows.pos))
    local = (index - rows.start[..., None])[:, :, None].expand(logits.shape)
    p = (logits.gather(-1, local) - lse[..., None]).exp()
    return index, live, p.mean(2)


def _judged(rows: Rows, index: Tensor, live: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Position, shown and free of the rows at `index`, see `Rows`."""
    at = rows.pos[index].to(torch.int64)
    shown = live & (at >= rows.pinned)
    return at, shown, _free(at, shown, rows.newest, rows.sinks, rows.recent)


def _free(at: Tensor, shown: Tensor, newest: Tensor, sinks: int, recent: int) -> Tensor:
    free = shown & (at >= sinks) & (at <= newest - recent)
    return free | (~free.any(-1, keepdim=True) & shown & (at < newest))


def _into(column: Tensor, index: Tensor, new: Tensor, go: Tensor) -> Tensor:
    """Write `new` to the rows of a column unless `go` is false; what then stands there."""
    new = torch.where(go, new, column[index])
    column.scatter_(0, index.flatten(), new.flatten())
    return new


def _give_up(
    hole: Tensor, rows: Rows, scores: Tensor, at: Tensor, free: Tensor, go: Tensor
) -> None:
    leaves = rows.start + _oldest_of_lowest(scores, at, free)
    chosen = torch.where(rows.length > rows.cap, leaves, -1)
    hole.copy_(torch.where(go, chosen, hole))


def _oldest_of_lowest(scores: Tensor, at: Tensor, free: Tensor) -> Tensor:
    """int64 [...]: of the free rows [..., C] with the lowest score the one with the smallest
    position."""
    scores = scores.to(torch.float32).masked_fill(~free, math.inf)
    tied = free & (scores <= scores.amin(-1, keepdim=True))
    return at.masked_fill(~tied, 1 << 40).argmin(-1)


def _mean_by_position(values: Tensor, at: Tensor) -> Tensor:
    """Mean of values [L, H, C] over the rows of a layer with the same position at [L, H, C];
    nothing sensible where at is -1."""
    flat = at.flatten(1)
    ordered, order = flat.sort(dim=1, stable=True)
    new = torch.cat((ordered[:, :1] * 0, (ordered[:, 1:] != ordered[:, :-1]).long()), 1)
    group = torch.empty_like(order).scatter_(1, order, new.cumsum(1))
    sums = torch.zeros(flat.shape, dtype=torch.float64, device=flat.device)
    sums.scatter_add_(1, group, values.flatten(1).to(torch.float64))
    counts = torch.zeros_like(sums).scatter_add_(1, group, torch.ones_like(sums))
    return (sums / counts).gather(1, group).view(values.shape).to(values.dtype)


def _codes(x: Tensor, matrix: Tensor) -> Tensor:
    """int64 [...]: the signs of x [..., D] @ matrix [D, B] as one number."""
    signs = (x.to(torch.float32) @ matrix >= 0).to(torch.int64)
    return (signs << torch.arange(matrix.shape[1], device=x.device)).sum(-1)


def _bits(x: Tensor) -> Tensor:
    """The set bits of each int64."""
    return _bits32(x & 0xFFFFFFFF) + _bits32((x >> 32) & 0xFFFFFFFF)


def _bits32(x: Tensor) -> Tensor:
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24) & 0xFF


# -- the end of a prompt --------------------------------------------------------------------------


def rows_lse(q: Tensor, q_pos: Tensor, parts: Sequence[Part], window: int | None) -> Tensor:
    """float32 [H, G, T]: the log-sum-exp of the logits of queries q [H, G, T, D] at q_pos [T] over
    the rows of all parts that they see, -inf where they see none."""
    each = []
    for k, k_pos in map(_placed, parts):
        logits = torch.matmul(q.float(), k[:, None].float().transpose(2, 3))
        logits = logits * (1.0 / math.sqrt(q.shape[-1]))
        seen = _visible(q_pos, k_pos, window)[:, None]
        each.append(logits.masked_fill(~seen, -math.inf).logsumexp(-1))
    return torch.logsumexp(torch.stack(each), 0)


def segments_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    length: Tensor,
    hole: Tensor,
    most: int,
    *,
    pos: Tensor | None = None,
    q_pos: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`rows_attention` where every head has a segment of its own length.

    q [H, G, T, D]; k, v [R, D]; head h has the rows start[h] .. start[h] + length[h] - 1 without
    row hole[h], int64 [H]; no length exceeds `most`. With a window, row j is seen by query i iff
    q_pos[i] - pos[j] < window; pos int32 [R], q_pos int64 [T]. Rows are older than all queries. A
    query that sees nothing gets zeros and a log-sum-exp of -inf.
    """
    tables = torch.stack((start, length, hole), 1)
    return segments_by_head(q, k, v, tables, pos, q_pos, window, rows_attention)


def segments_by_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    pos: Tensor | None,
    q_pos: Tensor | None,
    window: int | None,
    attend: Callable[..., tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """`segments_attention` by one call of `attend`, which is `rows_attention` by whoever computes,
    for each head. tables int64 [H, 3]: start, length and hole."""
    parts = []
    for h, (begin, count, gone) in enumerate(tables.tolist()):
        rows: slice | Tensor = slice(begin, begin + count)
        if begin <= gone < begin + count:
            rows = torch.arange(begin, begin + count - 1, device=q.device)
            rows += rows >= gone
            count -= 1
        one = q[h : h + 1]
        if not count:
            lse = torch.full(one.shape[:3], -math.inf, device=q.device)
            parts.append((torch.zeros_like(one), lse))
        elif window is None:
            parts.append(attend(one, k[rows][None], v[rows][None]))
        else:
            assert pos is not None
            assert q_pos is not None
            at = pos[rows].to(torch.int64)[None]
            parts.append(visible_attention(one, k[rows][None], v[rows][None], q_pos, at, window))
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def survivors(keep: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
    """(index int64 [H, N], count int64 [H]): the kept rows of each head, ascending by position,
    are the first count[h] of index[h]. keep bool, pos int64 [H, N]; equal positions in order."""
    order = pos.masked_fill(~keep, torch.iinfo(pos.dtype).max).argsort(dim=1, stable=True)
    return order, keep.sum(1)


def gather_rows(
    index: Tensor,
    count: Tensor,
    start: Tensor,
    fresh: tuple[Tensor, Tensor],
    old: tuple[Tensor, Tensor, Tensor] | None,
    into: tuple[Tensor, Tensor],
    most: int,
) -> None:
    """Move the kept rows of each head into its segment: k and v, in place.

    Row start[h] + r of `into` (k, v [R, D]) becomes row index[h, r] of the head, for r < count[h];
    int64 [H, N], [H], [H]. A head's rows are those of `old` (k, v [E, D] and which rows they are,
    int64 [H, B]), then those of `fresh` (k, v [H, T, D]). Of the kept rows, too, those of `old`
    come first. No count exceeds `most`. `old` and `fresh` share no row with those written.
    """
    before = 0 if old is None else old[2].shape[1]
    for h, (n, begin) in enumerate(torch.stack((count, start), 1).tolist()):
        rows, early = index[h, :n], 0
        if old is not None:
            early = int((rows < before).sum())
            place = old[2][h, rows[:early]]
        rows = rows[early:] - before
        for name in (0, 1):
            here = into[name][begin : begin + n]
            if old is not None:
                torch.index_select(old[name], 0, place, out=here[:early])
            torch.index_select(fresh[name][h], 0, rows, out=here[early:])


def gather_column(
    index: Tensor, count: Tensor, start: Tensor, values: Tensor, into: Tensor, most: int
) -> None:
    """As `gather_rows` for a column: into[start[h] + r] = values[h, index[h, r]]; into [R], values
    [H, N]."""
    for h, (n, begin) in enumerate(torch.stack((count, start), 1).tolist()):
        into[begin : begin + n] = values[h, index[h, :n]].to(into.dtype)


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of rows x [t, n] by weight [n], [t, n], after y [t, n] was added to them in place.

    In float32, cast back before the weight is applied.
    """
    if y is not None:
        x.add_(y)
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [t, heads, D] by its positions, half-split: cos and sin [t, 1, D], the sine of the
    first half negated. A new contiguous tensor."""
    half = x.shape[-1] // 2
    turned = x * cos
    turned[..., :half].addcmul_(x[..., half:], sin[..., :half])
    turned[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return turned


def int8_product(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """x [t, n] times the transpose of scale [m] * codes int8 [m, n]: [t, m]; bfloat16, few rows."""
    return torch._weight_int8pack_mm(x.contiguous(), codes, scale)


def row_product(x: Tensor, weight: Tensor) -> Tensor:
    """One row x [1, n] times the transpose of weight [m, n]: [1, m], of their dtype."""
    return torch.mm(x, weight.t())


def silu_mul(both: Tensor) -> Tensor:
    """silu(gate) * up of rows both [t, 2 * n], gate first: a view [t, n] of it, in gate's place."""
    size = both.shape[1] // 2
    gate = both[:, :size]
    return gate.copy_(torch.nn.functional.silu(gate)).mul_(both[:, size:])
