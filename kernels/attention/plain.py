"""Attention of a prompt's queries: over the same number of rows in every head, under a sliding
window, and over the rows that remain from earlier turns.

Shapes use the project's letters (`minikv`). Logits are scaled by 1/sqrt(D); softmax is in float32.
Attention over disjoint sets of rows is joined by the log-sum-exp of the logits (`merge`), as in
FlashAttention (arXiv 2205.14135, section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from minikv.kernels.decode.plain import Segments

_LOGITS = 1 << 22
"""The most logits, or entries of a mask, of one block of queries."""


def rows_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention over rows that all queries see, or causal: query i sees rows 0 .. i.

    q [H, G, T, D], k and v [H, N, D]: any strides, but the last is 1. Returns the output
    [H, G, T, D] in q's dtype and the log-sum-exp of the logits [H, G, T] in float32, which joins
    parts (`merge`). T x N logits are never held at once.
    """
    if q.device.type == "cpu":
        return _cpu_attention(q, k, v, None, causal=causal)
    if q.device.type == "cuda":
        rows = q.shape[2] if causal else k.shape[1]
        fused = cuda_attention(q, k[:, :rows], v[:, :rows], causal=causal)
        if fused is not None:
            return fused
    keys = torch.arange(k.shape[1], device=q.device)
    outs, sums = [], []
    for part, begin in _row_blocks(q, q.shape[0] * q.shape[1] * k.shape[1]):
        mask = None
        if causal:
            at = torch.arange(begin, begin + part.shape[2], device=q.device)
            mask = (keys <= at[:, None])[None]
        out, lse = masked_attention(part, k, v, mask)
        outs.append(out)
        sums.append(lse)
    return torch.cat(outs, 2), torch.cat(sums, 2)


def last_rows_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of the last T of N rows over all of them: query i sees rows 0 .. N - T + i.

    Shapes and results as in `rows_attention`.
    """
    if q.device.type == "cuda":
        fused = cuda_attention(q, k, v, causal=True)
        if fused is not None:
            return fused
    earlier = k.shape[1] - q.shape[2]
    parts = [rows_attention(q, k[:, earlier:], v[:, earlier:], causal=True)]
    if earlier:
        parts.append(rows_attention(q, k[:, :earlier], v[:, :earlier]))
    return merge(parts)


def visible_attention(
    q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, window: int | None
) -> tuple[Tensor, Tensor]:
    """Attention by position: query i sees row j iff 0 <= q_pos[i] - k_pos[h, j] < window.

    q [H, G, T, D]; k, v [H, N, D]; q_pos [T]; k_pos [H or 1, N], -1 for padding. Results as in
    `rows_attention`; a query that sees no row gets zeros and a log-sum-exp of -inf.
    """
    on_cpu = q.device.type == "cpu"
    padding = k_pos[..., None] < 0
    if on_cpu and bool(padding.any()):  # an added mask does not hide NaN
        k, v = k.masked_fill(padding, 0.0), v.masked_fill(padding, 0.0)
    wide = len(k_pos) if on_cpu else q.shape[0] * q.shape[1]
    outs, sums = [], []
    for part, begin in _row_blocks(q, wide * k.shape[1]):
        at = q_pos[begin : begin + part.shape[2]]
        out, lse = (_cpu_attention if on_cpu else masked_attention)(
            part, k, v, visible(at, k_pos, window)
        )
        outs.append(out)
        sums.append(lse)
    return torch.cat(outs, 2), torch.cat(sums, 2)


def total(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The log-sum-exp over all parts: [(output [..., D], log-sum-exp [...])] -> [...]."""
    return torch.logsumexp(torch.stack([lse for _, lse in parts]), 0)


def merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Join attention over disjoint sets of rows: [(output [H, G, T, D], log-sum-exp [H, G, T])] ->
    the same for all rows.

    A log-sum-exp of -inf means that the query saw no row of the part; the part then adds nothing.
    Each query must have seen a row of at least one part.
    """
    if len(parts) == 1:
        return parts[0]
    whole = total(parts)
    joined = torch.empty_like(parts[0][0])
    for h in range(len(joined)):  # head by head, so that the float32 copies stay small
        out = parts[0][0][h] * (parts[0][1][h] - whole[h]).exp()[..., None]
        for other, lse in parts[1:]:
            out = out.addcmul_(other[h], (lse[h] - whole[h]).exp()[..., None])
        joined[h] = out
    return joined, whole


def visible(q_pos: Tensor, k_pos: Tensor, window: int | None) -> Tensor:
    """Which rows each query sees, bool [H or 1, T, N], from q_pos [T] and k_pos [H or 1, N]."""
    rows, queries = k_pos[:, None, :], q_pos[None, :, None]
    seen = (rows <= queries).logical_and_(rows >= 0)
    return seen if window is None else seen.logical_and_(rows > queries - window)


def _row_blocks(q: Tensor, width: int) -> list[tuple[Tensor, int]]:
    """Split the queries into blocks of at most `_LOGITS` numbers, but at least one query: (block,
    index of its first query). width: logits, or entries of a mask, per query."""
    size = max(1, _LOGITS // max(1, width))
    return [(q[:, :, lo : lo + size], lo) for lo in range(0, q.shape[2], size)]


def _cpu_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Like `masked_attention`, by the kernel behind scaled_dot_product_attention on a CPU.

    The kernel is called directly because it also returns the log-sum-exp. The expanded heads have
    stride 0, so nothing is copied. k and v must be finite.
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
        unseen = ~mask.any(2)[:, None]
        out = out.masked_fill(unseen[..., None], 0.0)
        lse = lse.masked_fill(unseen, -math.inf)
    return out, lse


def cuda_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None
) -> tuple[Tensor, Tensor] | None:
    """Attention of T queries over N rows by the kernels behind scaled_dot_product_attention on
    CUDA. None if they do not support the dtype, the head size or the GPU.

    causal: query i sees rows 0 .. N - T + i, with a window only the last `window` of these. Both
    kernels have such masks. scaled_dot_product_attention has them only for T = N, and returns no
    log-sum-exp. Results as in `rows_attention`.
    """
    heads, group, rows, size = q.shape
    keys = k.shape[1]
    ops = torch.ops.aten
    if (size * q.element_size()) % 16 or size > 256 or q.dtype == torch.float64:
        return None
    modern = torch.cuda.get_device_capability(q.device) >= (8, 0)
    if q.dtype == torch.bfloat16 and not modern:
        return None
    if q.dtype != torch.float32 and modern:
        # This kernel takes grouped heads: query head i uses KV head i // G.
        out = ops._flash_attention_forward(
            q.flatten(0, 1).transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            None,
            *(None, rows, keys, 0.0, causal and window is None, False),
            window_size_left=None if window is None else window - 1,
            window_size_right=None if window is None else 0,
        )
        mixed = out[0][0].unflatten(1, (heads, group)).permute(1, 2, 0, 3)
        return mixed, out[1].view(heads, group, rows)
    # This kernel needs one KV head per query head. Expanded heads have stride 0, so nothing is
    # copied. Mask type 2 is causal, where the last query sees the last row.
    shape = (heads, group, keys, size)
    out = ops._efficient_attention_forward(
        q.transpose(1, 2),
        k[:, None].expand(shape).transpose(1, 2),
        v[:, None].expand(shape).transpose(1, 2),
        *(None, None, None, None, None, 0.0, 2 if causal else 0, True),
        window_size=window,
    )
    # The kernel pads the log-sum-exp to a multiple of 32 queries.
    return out[0].transpose(1, 2), out[1][..., :rows]


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention in plain operations under mask [H or 1, T, N]: True where query i sees row j.

    q [H, G, T, D], k and v [H, N, D]. A query that sees no row gets zeros and -inf.
    """
    logits = torch.matmul(q.float(), k[:, None].float().transpose(2, 3))
    logits = logits * (1.0 / math.sqrt(q.shape[-1]))
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None], -math.inf)
        # A row that no query sees may hold NaN, and 0 x NaN is not 0.
        v = v.masked_fill(~mask.any(1)[..., None], 0.0)
    lse = torch.logsumexp(logits, -1)
    p = (logits - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
    return torch.matmul(p.to(v.dtype), v[:, None]), lse


Attend = Callable[..., tuple[Tensor, Tensor]]


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, attend: Attend = rows_attention
) -> tuple[Tensor, Tensor]:
    """Attention of the last T of N rows: row i sees rows max(0, i - window + 1) .. i.

    q [H, G, T, D], k and v [H, N, D], N >= T: any strides, but the last is 1. attend: the form of
    `rows_attention` to call. Results as in `rows_attention`. Needs no mask, and except for the
    results only copies of at most T rows.
    """
    if q.device.type == "cuda":
        fused = cuda_attention(q, k, v, causal=True, window=window)
        if fused is not None:
            return fused
    first = k.shape[1] - q.shape[2]
    parts = [
        _stretch(q[:, :, lo:hi], k[:, : first + hi], v[:, : first + hi], window, attend)
        for lo, hi in _stretches(first, q.shape[2], window)
    ]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def _stretches(first: int, rows: int, window: int) -> Iterator[tuple[int, int]]:
    """Divide `rows` queries, the first of which is row `first`, into stretches: (begin, end) of
    each.

    The first stretch contains the queries that see all rows before them. The other stretches have
    fewer rows than the window (one row if it is 1), are as few as possible, and have about the same
    size.
    """
    lo = min(max(0, window - first), rows)
    if lo:
        yield 0, lo
    if lo < rows:
        count = -(-(rows - lo) // max(1, window - 1))
        size = -(-(rows - lo) // count)
        for begin in range(lo, rows, size):
            yield begin, min(begin + size, rows)


def _stretch(q: Tensor, k: Tensor, v: Tensor, window: int, attend: Attend) -> tuple[Tensor, Tensor]:
    """`window_attention` of one stretch."""
    hi = k.shape[1]
    lo = hi - q.shape[2]
    begin = hi - window + 1 if hi > window else 0  # all queries see the rows from here on
    parts = [attend(q, k[:, lo:], v[:, lo:], causal=True)]
    if begin < lo:
        parts.append(attend(q, k[:, begin:lo], v[:, begin:lo]))
    if 0 < begin <= lo:  # a window of 1 has no such rows
        early = slice(lo - window + 1, begin)
        out, lse = attend(q.flip(2), k[:, early].flip(1), v[:, early].flip(1), causal=True)
        parts.append((out.flip(2), lse.flip(2)))
    return merge(parts)


def ragged_prefill(
    q: Tensor,
    rows: Segments,
    free_slot: Tensor,
    q_pos: Tensor | None = None,
    window: int | None = None,
    attend: Attend = rows_attention,
) -> tuple[Tensor, Tensor]:
    """Attention of q [H, G, T, D] over the segment of each head, except row free_slot[h] (-1:
    none). All rows are older than the queries, and not int8.

    With a window, query i sees row j iff q_pos[i] - pos[j] < window; q_pos int64 [T]. Results as in
    `rows_attention`; a query that sees no row gets zeros and a log-sum-exp of -inf. attend: a form
    of `rows_attention`, called for each head if there is no window.
    """
    k, v, pos, parts = rows.k, rows.v, rows.pos, []
    tables = torch.stack((rows.start, rows.length, free_slot), 1)
    for h, (begin, count, free) in enumerate(tables.tolist()):
        mine: slice | Tensor = slice(begin, begin + count)
        if begin <= free < begin + count:
            mine = torch.arange(begin, begin + count - 1, device=q.device)
            mine += mine >= free
            count -= 1
        one = q[h : h + 1]
        if not count:
            lse = torch.full(one.shape[:3], -math.inf, device=q.device)
            parts.append((torch.zeros_like(one), lse))
        elif window is None:
            parts.append(attend(one, k[mine][None], v[mine][None]))
        else:
            assert pos is not None
            assert q_pos is not None
            at = pos[mine].to(torch.int64)[None]
            parts.append(visible_attention(one, k[mine][None], v[mine][None], q_pos, at, window))
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
