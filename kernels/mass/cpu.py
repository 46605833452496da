"""The attention that queries give each row, in C (`attention_mass.c`). `plain.py`
takes other dtypes and computes the log-sum-exps that C needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minikv.kernels.mass import plain as plain_torch
from minikv.kernels.mass.plain import Part, with_index
from minikv.kernels.native.binding import KINDS, Struct, function

_SUM, _PEAK, _EACH = range(3)
_MAX_HEAD_DIM = 256

_attention_mass = function("attention_mass", "pp", "what attention gave each row")


def add_attention_mass(
    mass: Tensor,
    squares: Tensor,
    q: Tensor,
    lse: Tensor,
    q_pos: Tensor,
    k: Tensor,
    k_pos: Tensor,
    window: int | None,
    index: Tensor | None = None,
    *,
    fresh: bool = False,
) -> None:
    """See `plain.add_attention_mass`."""
    part = with_index((k, k_pos) if index is None else (k, k_pos, index))
    exact = mass.dtype == squares.dtype == torch.float32
    if _fits(q, q_pos, part) and exact and mass.stride(2) == squares.stride(1) == 1:
        if fresh:
            mass.zero_()
            squares.zero_()
        _run(_SUM, q, q_pos, lse, part, window, mass=mass, squares=squares)
    else:
        plain_torch.add_attention_mass(
            mass, squares, q, lse, q_pos, k, k_pos, window, index, fresh=fresh
        )


def each_attention(
    q: Tensor,
    q_pos: Tensor,
    parts: Sequence[Part],
    window: int | None,
    lse: Tensor,
    heads: slice,
) -> Tensor:
    """See `plain.each_attention`."""
    each = [with_index(part) for part in parts]
    if not all(_fits(q, q_pos, part) for part in each):
        return plain_torch.each_attention(q, q_pos, parts, window, lse, heads)
    q, lse = q[heads], lse[heads]
    out = torch.empty((*lse.shape, sum(part[1].shape[1] for part in each)))
    begin = 0
    for k, k_pos, index in each:
        end = begin + k_pos.shape[1]
        mine = (
            k[heads] if index is None else k,
            k_pos[heads] if len(k_pos) > 1 else k_pos,
            None if index is None else index[heads],
        )
        _run(_EACH, q, q_pos, lse, mine, window, each=out[..., begin:end])
        begin = end
    return out


def peak_attention(
    q: Tensor,
    q_pos: Tensor,
    parts: Sequence[Part],
    scored: int,
    window: int | None,
    scale: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """See `plain.peak_attention`."""
    part = with_index(parts[scored])
    if not _fits(q, q_pos, part):
        return plain_torch.peak_attention(q, q_pos, parts, scored, window, scale, lse)
    lse = plain_torch.rows_lse(q, q_pos, parts, window) if lse is None else lse
    if scale is not None:
        lse = lse - scale.float().log()
    peak = torch.zeros((*q.shape[:2], part[1].shape[1]))
    _run(_PEAK, q, q_pos, lse, part, window, mass=peak)
    return peak


def _fits(q: Tensor, q_pos: Tensor, part: tuple[Tensor, Tensor, Tensor | None]) -> bool:
    """Whether C takes these queries [H, G, T, D] and keys."""
    k, k_pos, index = part
    known = q.dtype == k.dtype and q.dtype in KINDS and q.shape[3] <= _MAX_HEAD_DIM
    rows = (k_pos,) if index is None else (k_pos, index)
    listed = all(x.dtype == torch.int64 and (x.stride(1) == 1 or x.shape[1] == 1) for x in rows)
    listed = listed and q_pos.dtype == torch.int64
    return known and listed and q.stride(3) == k.stride(-1) == 1 and q.is_cpu


def _run(
    made: int,
    q: Tensor,
    q_pos: Tensor,
    lse: Tensor,
    part: tuple[Tensor, Tensor, Tensor | None],
    window: int | None,
    *,
    mass: Tensor | None = None,
    squares: Tensor | None = None,
    each: Tensor | None = None,
) -> None:
    k, k_pos, index = part
    heads, group, rows, size = q.shape
    keys = k_pos.shape[1]
    if not q.numel() or not keys:
        return
    lse = lse.float().contiguous()
    tensors = Struct(q, k, q_pos, k_pos, index, lse, mass, squares, each)
    shape = Struct(
        heads,
        group,
        rows,
        keys,
        size,
        window or 0,
        KINDS[q.dtype],
        made,
        *q.stride()[:3],
        q_pos.stride(0),
        k.stride(0) if index is None else 0,
        k.stride(-2),
        0 if index is None else index.stride(0),
        0 if len(k_pos) == 1 else k_pos.stride(0),
        *((0, 0) if mass is None else mass.stride()[:2]),
        0 if squares is None else squares.stride(0),
        *((0, 0, 0) if each is None else each.stride()[:3]),
    )
    _attention_mass(tensors, shape)
