"""`ragged_attention` on a CPU without a compiler: views of the rows instead of copies.

A CPU tensor's numbers can be read without waiting, so the heads' places decide how it is computed:
heads of one length at even distances are one batch; uneven heads are one product over all rows of
the layer with a mask, as long as that is small; else one head after the other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_JOINT = 1 << 19  # logits up to which one product for all heads beats a loop over uneven ones


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
    """See `minikv.kernels.torch.decode.ragged_attention`."""
    heads, group = q.shape[:2]
    starts, counts = start.tolist(), length.tolist()
    begin, end = min(starts), max(s + n for s, n in zip(starts, counts, strict=True))
    apart = starts[1] - starts[0] if heads > 1 else counts[0]
    alike = 0 < counts[0] <= apart and all(
        n == counts[0] and s == starts[0] + h * apart
        for h, (s, n) in enumerate(zip(starts, counts, strict=True))
    )
    if alike:
        mixed, sums = _batched(
            q, k, v, starts[0], apart, counts[0], pos, oldest, logits, k_scale, v_scale
        )
    elif min(counts) > 0 and heads * group * (end - begin) <= _JOINT:
        mixed, sums = _joint(
            q, k, v, start, length, starts, counts, pos, oldest, logits, k_scale, v_scale
        )
    else:
        mixed = torch.zeros_like(q)
        sums = torch.full((heads, group), -math.inf)
        for h, (s, n) in enumerate(zip(starts, counts, strict=True)):
            if n:
                one = None if logits is None else logits[h : h + 1]
                mixed[h : h + 1], sums[h : h + 1] = _batched(
                    q[h : h + 1], k, v, s, n, n, pos, oldest, one, k_scale, v_scale
                )
    if lse is not None:
        sums = lse.copy_(sums)
    return mixed, sums


def _batched(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    begin: int,
    apart: int,
    count: int,
    pos: Tensor | None,
    oldest: Tensor | None,
    logits: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Heads of `count` rows, the first from row `begin` on, each `apart` rows behind the other."""
    heads = len(q)
    keys, values = _batch(k, begin, heads, apart, count), _batch(v, begin, heads, apart, count)
    scale, other = (
        None if t is None else _batch(t, begin, heads, apart, count) for t in (k_scale, v_scale)
    )
    found = _logits(q, keys, scale)
    if pos is not None and oldest is not None:
        hidden = _batch(pos, begin, heads, apart, count) < oldest
        found.masked_fill_(hidden[:, None], -math.inf)
    if logits is not None:
        logits[..., :count] = found
    return _mix(q, found, values, other)


def _joint(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    length: Tensor,
    starts: list[int],
    counts: list[int],
    pos: Tensor | None,
    oldest: Tensor | None,
    logits: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Uneven heads: every query over the rows of all heads, those of other heads hidden."""
    heads, group, size = q.shape
    begin, end = min(starts), max(s + n for s, n in zip(starts, counts, strict=True))
    part, reach = slice(begin, end), torch.arange(begin, end)
    hidden = (reach < start[:, None]) | (reach >= (start + length)[:, None])
    keys, values = k[part], v[part]
    scale, other = (None if t is None else t[part] for t in (k_scale, v_scale))
    if sum(counts) < end - begin:
        # What nobody has written yet is weighed with 0, and 0 x NaN is not 0.
        unused = hidden.all(0)
        keys, values = (t.masked_fill(unused[:, None], 0) for t in (keys, values))
        if scale is not None and other is not None:
            scale, other = (t.masked_fill(unused, 0) for t in (scale, other))
    if pos is not None and oldest is not None:
        hidden = hidden | (pos[part] < oldest)
    flat = _logits(
        q.reshape(1, heads * group, size), keys[None], None if scale is None else scale[None]
    )
    found = flat.view(heads, group, -1)
    found.masked_fill_(hidden[:, None], -math.inf)
    if logits is not None:
        for h, (s, n) in enumerate(zip(starts, counts, strict=True)):
            logits[h, :, :n] = found[h, :, s - begin : s - begin + n]
    mixed, sums = _mix(
        q.view(1, heads * group, size), flat, values[None], None if other is None else other[None]
    )
    return mixed.view(heads, group, size), sums.view(heads, group)


def _batch(t: Tensor, begin: int, heads: int, apart: int, count: int) -> Tensor:
    """Rows [R, ...] as a view [H, count, ...]: head h has those from begin + h * apart on."""
    step = t.stride(0)
    return t.as_strided(
        (heads, count, *t.shape[1:]),
        (apart * step, *t.stride()),
        t.storage_offset() + begin * step,
    )


def _logits(q: Tensor, k: Tensor, scale: Tensor | None) -> Tensor:
    """float32 [B, g, n]: scaled logits of q [B, g, D] over k [B, n, D]; scale [B, n]: k is int8."""
    if scale is not None:
        # An int8 is exact in bfloat16; in float16 the sums would not fit.
        q = q.float() if q.dtype == torch.float16 else q
        k = k.to(q.dtype)
    factor = 1.0 / math.sqrt(q.shape[-1])
    if q.dtype == torch.float32:
        found = torch.matmul(q, k.transpose(1, 2)).mul_(factor)
    else:  # on a CPU about 15 times as fast in bfloat16 as the product above
        product = torch.matmul(k, q.transpose(1, 2)).transpose(1, 2)
        found = torch.empty(product.shape)  # contiguous: what follows goes along the rows
        found.copy_(product).mul_(factor)
    return found if scale is None else found.mul_(scale[:, None])


def _mix(q: Tensor, logits: Tensor, v: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output [B, g, D] in q's dtype and the log-sum-exp [B, g] of logits [B, g, n]."""
    p = logits.softmax(-1)
    sums = logits.amax(-1) - p.amax(-1).log_()  # a fraction of what a log-sum-exp takes
    if scale is not None:
        p *= scale[:, None]
        v = v.to(torch.float32 if q.dtype == torch.float16 else q.dtype)
    return torch.matmul(p.to(v.dtype), v).to(q.dtype), sums
