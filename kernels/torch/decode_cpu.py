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
    heads, group, size = q.shape
    starts, counts = start.tolist(), length.tolist()
    count = counts[0]
    apart = starts[1] - starts[0] if heads > 1 else count
    alike = count > 0 and all(
        n == count and s == starts[0] + h * apart
        for h, (s, n) in enumerate(zip(starts, counts, strict=True))
    )
    begin, end = min(starts), max(s + n for s, n in zip(starts, counts, strict=True))
    if alike and apart >= count:
        keys, values, *scales = (
            None if t is None else _batch(t, starts[0], heads, apart, count)
            for t in (k, v, k_scale, v_scale)
        )
        assert keys is not None
        assert values is not None
        seen = None
        if pos is not None and oldest is not None:
            seen = (_batch(pos, starts[0], heads, apart, count) >= oldest)[:, None]
        found = _logits(q, keys, scales[0])
        if seen is not None:
            found = found.masked_fill(~seen, -math.inf)
        mixed, sums = _mix(q, found, values, scales[1])
        if logits is not None:
            logits[..., :count] = found
    elif min(counts) > 0 and heads * group * (end - begin) <= _JOINT:
        reach = torch.arange(begin, end)
        mine = (reach >= start[:, None]) & (reach < (start + length)[:, None])
        seen = mine
        if pos is not None and oldest is not None:
            seen = mine & (pos[begin:end] >= oldest)
        # What nobody has written yet is weighed with 0, and 0 x NaN is not 0.
        rows = mine.any(0)
        part = slice(begin, end)
        keys, values = (_clean(t[part], rows) for t in (k, v))
        scales = [None if t is None else _clean(t[part], rows) for t in (k_scale, v_scale)]
        query = q.reshape(1, heads * group, size)
        found = _logits(query, keys[None], _first(scales[0]))[0].view(heads, group, -1)
        found = found.masked_fill(~seen[:, None], -math.inf)
        flat, sums = _mix(query, found.flatten(0, 1)[None], values[None], _first(scales[1]))
        mixed, sums = flat.view(heads, group, size), sums.view(heads, group)
        if logits is not None:
            wide = min(width, end - begin)
            index = (start - begin)[:, None] + torch.arange(wide)
            index = index.clamp(max=end - begin - 1)[:, None].expand(heads, group, wide)
            logits[..., :wide] = found.gather(2, index)
    else:
        mixed = torch.zeros_like(q)
        sums = torch.full((heads, group), -math.inf)
        for h, (s, n) in enumerate(zip(starts, counts, strict=True)):
            if not n:
                continue
            part = slice(s, s + n)
            scales = [None if t is None else t[None, part] for t in (k_scale, v_scale)]
            found = _logits(q[h : h + 1], k[None, part], scales[0])
            if pos is not None and oldest is not None:
                found = found.masked_fill(pos[part] < oldest, -math.inf)
            mixed[h : h + 1], sums[h : h + 1] = _mix(q[h : h + 1], found, v[None, part], scales[1])
            if logits is not None:
                logits[h, :, :n] = found[0]
    if lse is not None:
        sums = lse.copy_(sums)
    return mixed, sums


def _batch(t: Tensor, begin: int, heads: int, apart: int, count: int) -> Tensor:
    """Rows [R, ...] as a view [H, count, ...]: head h has those from begin + h * apart on."""
    step = t.stride(0)
    return t.as_strided(
        (heads, count, *t.shape[1:]),
        (apart * step, *t.stride()),
        t.storage_offset() + begin * step,
    )


def _clean(t: Tensor, rows: Tensor) -> Tensor:
    """A copy with zeros in rows [n] that are not meant, if there are any."""
    if bool(rows.all()):
        return t
    return t.masked_fill(~rows.view(-1, *[1] * (t.dim() - 1)), 0)


def _first(t: Tensor | None) -> Tensor | None:
    return None if t is None else t[None]


def _logits(q: Tensor, k: Tensor, scale: Tensor | None) -> Tensor:
    """float32 [B, g, n]: scaled logits of q [B, g, D] over k [B, n, D]; scale [B, n]: k is int8."""
    if scale is not None:
        # An int8 is exact in bfloat16; in float16 the sums would not fit.
        q = q.float() if q.dtype == torch.float16 else q
        k = k.to(q.dtype)
    if q.dtype == torch.float32:
        found = torch.matmul(q, k.transpose(1, 2))
    else:  # on a CPU about 15 times as fast in bfloat16 as the product above
        found = torch.matmul(k, q.transpose(1, 2)).transpose(1, 2).float()
    found = found * (1.0 / math.sqrt(q.shape[-1]))
    return found if scale is None else found * scale[:, None]


def _mix(q: Tensor, logits: Tensor, v: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mixed values [B, g, D] in q's dtype and the log-sum-exp [B, g] of logits [B, g, n]."""
    sums = logits.logsumexp(-1)
    p = (logits - sums[..., None]).exp_()
    if scale is not None:
        p = p * scale[:, None]
        v = v.to(torch.float32 if q.dtype == torch.float16 else q.dtype)
    return torch.matmul(p.to(v.dtype), v).to(q.dtype), sums
