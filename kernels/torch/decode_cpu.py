"""`ragged_attention` on a CPU without a compiler: views of the rows instead of copies.

The numbers of a CPU tensor can be read without waiting, so the layout of the heads decides how it
is computed. Heads of one length at equal distances are one batch. Uneven heads are one product over
all rows of the layer, with a mask, as long as that is small. Otherwise heads go one by one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MAX_JOINT = 1 << 19  # logits up to which one product for uneven heads is faster than a loop


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
    """See `torch.decode.ragged_attention`."""
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
        x = _logits(q, keys, scales[0])
        if seen is not None:
            x = x.masked_fill(~seen, -math.inf)
        out, sums = _output(q, x, values, scales[1])
        if logits is not None:
            logits[..., :count] = x
    elif min(counts) > 0 and heads * group * (end - begin) <= _MAX_JOINT:
        reach = torch.arange(begin, end)
        own = (reach >= start[:, None]) & (reach < (start + length)[:, None])
        seen = own
        if pos is not None and oldest is not None:
            seen = own & (pos[begin:end] >= oldest)
        # Rows that are not in use get probability 0, but 0 x NaN is not 0.
        rows = own.any(0)
        part = slice(begin, end)
        keys, values = (_zero_unused(t[part], rows) for t in (k, v))
        scales = [None if t is None else _zero_unused(t[part], rows) for t in (k_scale, v_scale)]
        query = q.reshape(1, heads * group, size)
        x = _logits(query, keys[None], _batch_of_one(scales[0]))[0].view(heads, group, -1)
        x = x.masked_fill(~seen[:, None], -math.inf)
        flat, sums = _output(query, x.flatten(0, 1)[None], values[None], _batch_of_one(scales[1]))
        out, sums = flat.view(heads, group, size), sums.view(heads, group)
        if logits is not None:
            wide = min(width, end - begin)
            index = (start - begin)[:, None] + torch.arange(wide)
            index = index.clamp(max=end - begin - 1)[:, None].expand(heads, group, wide)
            logits[..., :wide] = x.gather(2, index)
    else:
        out = torch.zeros_like(q)
        sums = torch.full((heads, group), -math.inf)
        for h, (s, n) in enumerate(zip(starts, counts, strict=True)):
            if not n:
                continue
            part = slice(s, s + n)
            scales = [None if t is None else t[None, part] for t in (k_scale, v_scale)]
            x = _logits(q[h : h + 1], k[None, part], scales[0])
            if pos is not None and oldest is not None:
                x = x.masked_fill(pos[part] < oldest, -math.inf)
            out[h : h + 1], sums[h : h + 1] = _output(q[h : h + 1], x, v[None, part], scales[1])
            if logits is not None:
                logits[h, :, :n] = x[0]
    if lse is not None:
        sums = lse.copy_(sums)
    return out, sums


def _batch(t: Tensor, begin: int, heads: int, apart: int, count: int) -> Tensor:
    """Rows [R, ...] as a view [H, count, ...]: head h has the rows from begin + h * apart on."""
    step = t.stride(0)
    return t.as_strided(
        (heads, count, *t.shape[1:]),
        (apart * step, *t.stride()),
        t.storage_offset() + begin * step,
    )


def _zero_unused(t: Tensor, rows: Tensor) -> Tensor:
    """The rows, or a copy with zeros where `rows` bool [n] is false for some."""
    if bool(rows.all()):
        return t
    return t.masked_fill(~rows.view(-1, *[1] * (t.dim() - 1)), 0)


def _batch_of_one(t: Tensor | None) -> Tensor | None:
    return None if t is None else t[None]


def _logits(q: Tensor, k: Tensor, scale: Tensor | None) -> Tensor:
    """float32 [B, g, n]: scaled logits of q [B, g, D] over k [B, n, D]; scale [B, n]: k is int8."""
    if scale is not None:
        # An int8 is exact in bfloat16; in float16 the sums would not fit.
        q = q.float() if q.dtype == torch.float16 else q
        k = k.to(q.dtype)
    if q.dtype == torch.float32:
        x = torch.matmul(q, k.transpose(1, 2))
    else:  # in bfloat16 about 15 times as fast as the product above
        x = torch.matmul(k, q.transpose(1, 2)).transpose(1, 2).float()
    x = x * (1.0 / math.sqrt(q.shape[-1]))
    return x if scale is None else x * scale[:, None]


def _output(q: Tensor, logits: Tensor, v: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output [B, g, D] in q's dtype, and the log-sum-exp [B, g], of logits [B, g, n]."""
    sums = logits.logsumexp(-1)
    p = (logits - sums[..., None]).exp_()
    if scale is not None:
        p = p * scale[:, None]
        v = v.to(torch.float32 if q.dtype == torch.float16 else q.dtype)
    return torch.matmul(p.to(v.dtype), v).to(q.dtype), sums
