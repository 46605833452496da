"""`ragged_attention` on a CPU without a C compiler. Rows are not gathered: heads are views.

On a CPU the starts and lengths of the heads can be read without waiting. They decide how attention
is computed. Heads of equal length at even distances form one batch. Uneven heads are one product
over all rows of the layer, if that is small; otherwise they are computed one after another. Rows
whose dtype is not that of the products are converted first. So are bfloat16 rows if the processor
does not multiply bfloat16, because torch takes eleven times as long otherwise. Many rows are
converted head by head, so that the copies stay small.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from minikv.kernels.decode.plain import Segments
from minikv.kernels.native import choice

_JOINT = 1 << 19  # up to this many logits, one product is faster than a loop over uneven heads
_LAYOUTS = 128  # how many are cached: about as many as a model has layers
_CACHED = 1 << 15  # a layout of more numbers is not cached: 128 of these take 16 MiB
_CONVERTED = 1 << 22  # up to this many numbers, the keys of a layer are converted together


def ragged_attention(
    q: Tensor,
    rows: Segments,
    logits: Tensor | None = None,
    lse: Tensor | None = None,
    arrived: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `minikv.kernels.decode.plain.ragged_attention`."""
    heads, group = q.shape[:2]
    starts, counts = rows.start.tolist(), rows.length.tolist()
    begin, end = min(starts), max(s + n for s, n in zip(starts, counts, strict=True))
    apart = starts[1] - starts[0] if heads > 1 else counts[0]
    alike = 0 < counts[0] <= apart and all(
        n == counts[0] and s == starts[0] + h * apart
        for h, (s, n) in enumerate(zip(starts, counts, strict=True))
    )
    large = rows.k.dtype != _product_dtype(q) and (end - begin) * q.shape[2] > _CONVERTED
    if alike and not large:
        mixed, sums = _batched(q, rows, starts[0], apart, counts[0], logits)
    elif min(counts) > 0 and not large and heads * group * (end - begin) <= _JOINT:
        mixed, sums = _joint(q, rows, starts, counts, logits)
    else:
        mixed = torch.zeros_like(q)
        sums = torch.full((heads, group), -math.inf)
        for h, (s, n) in enumerate(zip(starts, counts, strict=True)):
            if n:
                one = None if logits is None else logits[h : h + 1]
                found = _batched(q[h : h + 1], rows, s, n, n, one)
                mixed[h : h + 1], sums[h : h + 1] = found
    if lse is not None:
        sums = lse.copy_(sums)
    return mixed, sums


def _batched(
    q: Tensor, rows: Segments, begin: int, apart: int, count: int, logits: Tensor | None
) -> tuple[Tensor, Tensor]:
    """For heads of `count` rows: the first begins at row `begin`, each further one `apart` rows
    later."""
    heads = len(q)
    keys, values, key_scale, value_scale = (
        None if t is None else _batch(t, begin, heads, apart, count)
        for t in (rows.k, rows.v, rows.k_scale, rows.v_scale)
    )
    assert keys is not None
    assert values is not None
    found = _logits(q, keys, key_scale)
    if rows.pos is not None and rows.oldest is not None:
        hidden = _batch(rows.pos, begin, heads, apart, count) < rows.oldest
        found.masked_fill_(hidden[:, None], -math.inf)
    if logits is not None:
        logits[..., :count] = found
    return _mix(q, found, values, value_scale)


def _joint(
    q: Tensor, rows: Segments, starts: list[int], counts: list[int], logits: Tensor | None
) -> tuple[Tensor, Tensor]:
    """For uneven heads: all queries over the rows of all heads; rows of other heads are masked."""
    heads, group, size = q.shape
    first, end = min(starts), max(s + n for s, n in zip(starts, counts, strict=True))
    part = slice(first, end)
    keys, values = rows.k[part], rows.v[part]
    scales = [None if t is None else t[part] for t in (rows.k_scale, rows.v_scale)]
    layout = _cached_layout if heads * (end - first) <= _CACHED else _layout
    bias, place = layout(tuple(s - first for s in starts), tuple(counts))
    if rows.pos is not None and rows.oldest is not None:
        bias = bias.masked_fill(rows.pos[part] < rows.oldest, -math.inf)
    found, mixed, sums = _over_all(q, keys, values, bias, *scales)
    if sum(counts) < end - first and not bool(mixed.isfinite().all()):
        # Rows between two heads have probability 0, but unwritten ones may hold NaN, and 0 x NaN is
        # NaN.
        unused = torch.ones(end - first, dtype=torch.bool)
        for s, n in zip(starts, counts, strict=True):
            unused[s - first : s - first + n] = False
        keys, values = (t.masked_fill(unused[:, None], 0) for t in (keys, values))
        scales = [None if t is None else t.masked_fill(unused, 0) for t in scales]
        found, mixed, sums = _over_all(q, keys, values, bias, *scales)
    if logits is not None:
        reach = place.shape[2]
        torch.gather(found, 2, place.expand(heads, group, reach), out=logits[..., :reach])
    return mixed.to(q.dtype).view(heads, group, size), sums.view(heads, group)


def _over_all(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [H, G, rows], mixed values [H * G, D] and log-sum-exps [H * G] of all queries over all
    rows."""
    heads, group, size = q.shape
    dtype = _product_dtype(q)
    query = q.view(heads * group, size).to(dtype)
    found = torch.mm(query, keys.to(dtype).T).float().view(heads, group, -1)
    if key_scale is not None:
        found *= key_scale
    own = torch.add(bias, found, alpha=1.0 / math.sqrt(size))
    p, sums = _softmax(own.view(heads * group, -1))
    if value_scale is not None:
        p *= value_scale
    return own, torch.mm(p.to(dtype), values.to(dtype)), sums


def _layout(starts: tuple[int, ...], counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The mask and the row numbers of uneven heads; rows are counted from the lowest start.

    float32 [H, 1, rows]: 0 where a row belongs to the head, else -inf. int64 [H, 1, longest]: which
    row is the head's n-th; any row if the head has fewer.
    """
    start, count = (torch.tensor(t)[:, None, None] for t in (starts, counts))
    end = max(s + n for s, n in zip(starts, counts, strict=True))
    row = torch.arange(end)
    bias = torch.zeros(len(starts), 1, end, dtype=torch.float32)
    bias.masked_fill_((row < start) | (row >= start + count), -math.inf)
    return bias, (start + torch.arange(max(counts))).clamp_(max=end - 1)


_cached_layout = lru_cache(maxsize=_LAYOUTS)(_layout)
"""A layout stays the same from step to step once every head is at its cap."""


def _batch(t: Tensor, begin: int, heads: int, apart: int, count: int) -> Tensor:
    """Rows [R, ...] as a view [H, count, ...]: those of head h begin at row begin + h * apart."""
    step = t.stride(0)
    return t.as_strided(
        (heads, count, *t.shape[1:]), (apart * step, *t.stride()), t.storage_offset() + begin * step
    )


def _product_dtype(q: Tensor) -> torch.dtype:
    """The dtype in which queries, keys and values are multiplied: bfloat16 if the queries have it
    and the processor multiplies it, else float32. Both represent int8 codes exactly."""
    if q.dtype == torch.bfloat16 and choice.multiplies_bf16():
        return torch.bfloat16
    return torch.float32


def _logits(q: Tensor, k: Tensor, scale: Tensor | None) -> Tensor:
    """float32 [B, G, n]: scaled logits of q [B, G, D] over k [B, n, D]; scale [B, n]: of int8 k."""
    dtype = _product_dtype(q)
    q, k = q.to(dtype), k.to(dtype)
    factor = 1.0 / math.sqrt(q.shape[-1])
    if dtype == torch.float32:
        found = torch.matmul(q, k.transpose(1, 2)).mul_(factor)
    else:  # in bfloat16, this order is about 15 times as fast as the product above
        product = torch.matmul(k, q.transpose(1, 2)).transpose(1, 2)
        found = torch.empty(product.shape)  # contiguous, for the softmax along the rows
        found.copy_(product).mul_(factor)
    return found if scale is None else found.mul_(scale[:, None])


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities and the log-sum-exp [B, G] of logits [B, G, n]; also without B."""
    p = logits.softmax(-1)
    # The largest logit minus the log of its probability: faster than torch.logsumexp.
    return p, logits.amax(-1) - p.amax(-1).log_()


def _mix(q: Tensor, logits: Tensor, v: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output [B, G, D] in q's dtype and the log-sum-exp [B, G] of logits [B, G, n]; scale [B, n]:
    of int8 v."""
    p, sums = _softmax(logits)
    if scale is not None:
        p.mul_(scale[:, None])
    dtype = _product_dtype(q)
    return torch.matmul(p.to(dtype), v.to(dtype)).to(q.dtype), sums
