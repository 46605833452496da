"""Every operation in plain torch: the specification, and the path on a CPU.

Shapes use the project's letters: H KV heads, G query heads per KV head, D head size, T new rows,
N cached rows, W observation rows. Logits are scaled by 1/sqrt(D); softmax is in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

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
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One query per head over its rows.

    q [H, G, D]; k, v [H, N, D]; seen bool [H, N] or None for all. Returns the mixed values
    [H, G, D] and the probabilities [H, G, N] in float32.
    """
    if q.dtype == torch.float32:
        logits = torch.matmul(q, k.transpose(1, 2))
    else:  # on a CPU about 15 times as fast in bfloat16 as the product above
        logits = torch.matmul(k, q.transpose(1, 2)).transpose(1, 2).float()
    logits = logits * (1.0 / math.sqrt(q.shape[-1]))
    if seen is not None:
        logits = logits.masked_fill(~seen[:, None], -math.inf)
    probabilities = logits.softmax(-1)
    return torch.matmul(probabilities.to(v.dtype), v), probabilities


def joint_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor
) -> tuple[Tensor, Tensor]:
    """One query per head over rows that belong to different heads, in one product for all.

    q [H, G, D]; k, v [n, D], all finite; seen bool [H * G, n]: the rows of a query's own head that
    it sees, one at least. Returns the mixed values [H, G, D] and each row's probability [n] in
    float32, the mean over the G queries of its head. Computes H times the products needed, which
    beats a loop over heads as long as H * G * n is small.
    """
    heads, group, size = q.shape
    query = q.reshape(heads * group, size)
    if q.dtype == torch.float32:
        logits = torch.matmul(query, k.T)
    else:  # see `decode_attention`
        logits = torch.matmul(k, query.T).T.float()
    logits = logits.mul_(1.0 / math.sqrt(size))
    p = torch.where(seen, logits, -math.inf).softmax(-1)
    mixed = torch.matmul(p.to(v.dtype), v).view(heads, group, size)
    return mixed, p.sum(0).mul_(1.0 / group)


def observe(
    q: Tensor, q_pos: Tensor, parts: list[tuple[Tensor, Tensor]], window: int | None
) -> tuple[Tensor, Tensor]:
    """What the last rows of a prompt look at.

    q [W, H, G, D]; q_pos [W]; parts are (k [H, n, D], k_pos [H or 1, n]) with -1 where there is no
    row; N is the sum of the n. Visibility as in `visible_attention`. Returns, in float32,
    the probabilities summed over the W rows [H, G, N], and the sum over the rows of the squared
    mean over G [H, N].
    """
    _, heads, group, _ = q.shape
    total = sum(k.shape[1] for k, _ in parts)
    mass = q.new_empty((heads, group, total), dtype=torch.float32)
    squares = q.new_empty((heads, total), dtype=torch.float32)
    for h, begin, _, p in _looks(q, q_pos, parts, window):
        end = begin + p.shape[-1]
        mass[h, :, begin:end] = p.sum(1)
        squares[h, begin:end] = p.mean(0).square_().sum(0)
    return mass, squares


def below_uniform(
    q: Tensor, q_pos: Tensor, parts: list[tuple[Tensor, Tensor]], window: int | None
) -> Tensor:
    """Which of the last rows of a prompt gave a row less than an even share: int64 [H, N].

    Arguments as `observe` takes them, W at most 32. Bit i is set if the i-th query from the end
    could see the row and gave it, in the mean over G, less than 1 / (rows that it saw).
    """
    rows, heads = q.shape[:2]
    bits = q.new_zeros((heads, sum(k.shape[1] for k, _ in parts)), dtype=torch.int64)
    seen = torch.zeros((heads, rows), device=q.device)
    for _, k_pos in parts:
        seen += _visible(q_pos, k_pos, window).sum(-1)
    place = 1 << torch.arange(rows - 1, -1, -1, device=q.device)
    for h, begin, at, p in _looks(q, q_pos, parts, window):
        low = (p.mean(0) < 1.0 / seen[h, :, None]) & _visible(q_pos, at[None], window)[0]
        bits[h, begin : begin + p.shape[-1]] = (low * place[:, None]).sum(0)
    return bits


def _looks(
    q: Tensor, q_pos: Tensor, parts: list[tuple[Tensor, Tensor]], window: int | None
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Head, first row, positions [n] and probabilities [G, W, n] of one block of rows after the
    other; arguments as `observe` takes them."""
    rows, heads, group, size = q.shape
    earliest = int(q_pos[0])
    for h in range(heads):
        query = q[:, h].float().transpose(0, 1) * (1.0 / math.sqrt(size))  # [G, W, D]

        def logits(k: Tensor, at: Tensor, h: int = h, query: Tensor = query) -> Tensor:
            found = torch.matmul(query, k[h].float().T)  # [G, W, n]
            if window is None and int(at.min()) >= 0 and int(at.max()) <= earliest:
                return found  # every query sees every row
            return found.masked_fill_(~_visible(q_pos, at[None], window), -math.inf)

        step = max(1, _OBSERVED // (group * rows))
        blocks = [
            (k[:, lo : lo + step], k_pos[h if k_pos.shape[0] > 1 else 0, lo : lo + step])
            for k, k_pos in parts
            for lo in range(0, k.shape[1], step)
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
) -> None:
    """Add what T queries give each row, in place, never holding T x N probabilities.

    mass [H, G, N] and squares [H, N] float32 as `observe` returns them; q [H, G, T, D]; lse
    [H, G, T], the log-sum-exp over all rows that the queries see, those in other parts too;
    q_pos [T]; k [H, N, D]; k_pos [H or 1, N], -1 where there is no row.
    """
    heads, group, rows, size = q.shape
    step = max(1, _OBSERVED // (group * rows))
    for h in range(heads):
        query = q[h].float() * (1.0 / math.sqrt(size))
        for lo in range(0, k.shape[1], step):
            hi = min(lo + step, k.shape[1])
            logits = torch.matmul(query, k[h, lo:hi].float().T)
            at = k_pos[h if k_pos.shape[0] > 1 else 0, lo:hi]
            p = logits.sub_(lse[h, ..., None]).exp_()
            p.masked_fill_(~_visible(q_pos, at[None], window), 0.0)
            mass[h, :, lo:hi] += p.sum(1)
            squares[h, lo:hi] += p.mean(0).square_().sum(0)


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
