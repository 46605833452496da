"""Writes the row of a new token, in Triton. `rotate_append` rotates and writes it, in one launch
per layer. `advance` chooses where the next one goes, in one launch for all layers. Specification:
`plain.py`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.append.plain import Advancing, Slots
from minikv.kernels.gpu import power, quantized


@triton.jit
def turned_rows(x, cos, sin, at, d, D: tl.constexpr, ok):
    """Rows x + at [..., DP] after rotation, float32, rounded where torch's operators round."""
    other = tl.where(d < D // 2, d + D // 2, d - D // 2)
    c = tl.load(cos + d, mask=d < D, other=0.0).to(tl.float32)
    s = tl.load(sin + d, mask=d < D, other=0.0).to(tl.float32)
    kind = x.dtype.element_ty
    one = tl.load(x + at + d, mask=ok, other=0.0).to(tl.float32) * c
    two = tl.load(x + at + other, mask=ok, other=0.0).to(tl.float32) * s
    return (one.to(kind).to(tl.float32) + two).to(kind)


@triton.jit(do_not_specialize_on_alignment=["slot", "position"])
def _rotate_append(
    qkv,
    cos,
    sin,
    slot,
    position,
    k,
    v,
    pos,
    blank,
    k_scale,
    v_scale,
    query,
    key,
    H: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    CODED: tl.constexpr,
):
    """Grid (H,): one program per KV head with its G queries. The arguments are those of
    `rotate_append`; the rotated ones are written to query [H, G, D] and key [H, D]."""
    head = tl.program_id(0)
    at = tl.load(slot + head)
    d = tl.arange(0, DP)
    real = d < D
    g = head * G + tl.arange(0, GP)[:, None]
    mine = (tl.arange(0, GP) < G)[:, None] & real[None, :]
    turned = turned_rows(qkv, cos, sin, g * D, d[None, :], D, mine)
    tl.store(query + g * D + d[None, :], turned, mask=mine)
    new_key = turned_rows(qkv, cos, sin, (H * G + head) * D, d, D, real)
    tl.store(key + head * D + d, new_key, mask=real)
    new_value = tl.load(qkv + (H * G + H + head) * D + d, mask=real, other=0.0)
    for i in tl.static_range(len(blank)):
        tl.store(blank[i] + at, tl.zeros((), tl.int32).to(blank[i].dtype.element_ty))
    if CODED:
        new_key, scale = quantized(new_key)
        tl.store(k_scale + at, scale)
        new_value, scale = quantized(new_value)
        tl.store(v_scale + at, scale)
        new_key = new_key.to(tl.int8)
        new_value = new_value.to(tl.int8)
    tl.store(k + at * D + d, new_key, mask=real)
    tl.store(v + at * D + d, new_value, mask=real)
    tl.store(pos + at, tl.load(position).to(tl.int32))


@triton.jit
def _advance(
    start,
    length,
    cap,
    free_slot,
    position,
    count,
    slot,
    N: tl.constexpr,
    NP: tl.constexpr,
    BEFORE: tl.constexpr,
):
    i = tl.arange(0, NP)
    ok = i < N
    rows = tl.load(count + i, mask=ok, other=0)
    free = tl.load(free_slot + i, mask=ok, other=-1)
    stays = free >= 0
    tl.store(length + i, rows, mask=ok)
    tl.store(slot + i, tl.where(stays, free, tl.load(start + i, mask=ok, other=0) + rows), mask=ok)
    if BEFORE:
        stays = stays | (rows >= tl.load(cap + i, mask=ok, other=0))
    tl.store(count + i, tl.where(stays, rows, rows + 1), mask=ok)
    before_step = tl.load(position)
    tl.debug_barrier()  # every thread has read it
    tl.store(position, before_step + 1)


def rotate_append(qkv: Tensor, cos: Tensor, sin: Tensor, new: Slots) -> tuple[Tensor, Tensor]:
    """See `plain.rotate_append`."""
    slot, position, k, v, pos, blank, k_scale, v_scale = new
    assert all(t.is_contiguous() for t in (qkv, cos, sin, slot, k, v))
    heads, size = len(slot), qkv.shape[1]
    group = len(qkv) // heads - 2
    query, key = qkv.new_empty((heads, group, size)), qkv.new_empty((heads, size))
    given = qkv, cos, sin, slot, position, k, v, pos, tuple(blank), k_scale, v_scale, query, key
    sizes = {"H": heads, "G": group, "GP": power(group), "D": size, "DP": power(size)}
    _rotate_append[(heads,)](*given, **sizes, CODED=k_scale is not None, num_warps=2)
    return query, key


def advance(heads: Advancing, *, before: bool) -> None:
    """See `plain.advance`."""
    assert all(t.is_contiguous() for t in heads)
    many = heads.length.numel()
    _advance[(1,)](*heads, N=many, NP=power(many), BEFORE=before, num_warps=4)
