"""The attention that queries give each row, in C (`attention_mass.c`). `plain.py`
handles other dtypes and computes the log-sum-exps that C needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minikv.kernels.mass import plain as plain_torch
from minikv.kernels.mass.plain import Part, Queries, with_index
from minikv.kernels.native.binding import KINDS, Struct, function

_SUM, _PEAK, _EACH, _FORM = range(4)
_MAX_HEAD_DIM = 256

_attention_mass = function("attention_mass", "pp", "what attention gave each row")


def add_attention_mass(
    mass: Tensor, squares: Tensor, queries: Queries, part: Part, *, fresh: bool = False
) -> None:
    """See `plain.add_attention_mass`."""
    exact = mass.dtype == squares.dtype == torch.float32
    if _fits(queries, part) and exact and mass.stride(2) == squares.stride(1) == 1:
        if fresh:
            mass.zero_()
            squares.zero_()
        _run(_SUM, queries, with_index(part), mass=mass, squares=squares)
    else:
        plain_torch.add_attention_mass(mass, squares, queries, part, fresh=fresh)


def each_attention(queries: Queries, parts: Sequence[Part], heads: slice) -> Tensor:
    """See `plain.each_attention`."""
    if not all(_fits(queries, part) for part in parts):
        return plain_torch.each_attention(queries, parts, heads)
    assert queries.lse is not None
    queries = queries._replace(q=queries.q[heads], lse=queries.lse[heads])
    out = torch.empty((*queries.q.shape[:3], sum(part[1].shape[1] for part in parts)))
    begin = 0
    for k, k_pos, index in map(with_index, parts):
        end = begin + k_pos.shape[1]
        at = k_pos[heads] if len(k_pos) > 1 else k_pos
        mine = (k[heads], at, None) if index is None else (k, at, index[heads])
        _run(_EACH, queries, mine, each=out[..., begin:end])
        begin = end
    return out


def peak_attention(
    queries: Queries, parts: Sequence[Part], scored: int, scale: Tensor | None = None
) -> Tensor:
    """See `plain.peak_attention`."""
    part, lse = parts[scored], queries.lse
    if not _fits(queries, part):
        return plain_torch.peak_attention(queries, parts, scored, scale)
    lse = plain_torch.rows_lse(queries, parts) if lse is None else lse
    if scale is not None:
        lse = lse - scale.float().log()
    peak = torch.zeros((*queries.q.shape[:2], part[1].shape[1]))
    _run(_PEAK, queries._replace(lse=lse), with_index(part), mass=peak)
    return peak


def quadratic_forms(x: Tensor, matrices: Tensor, most: int) -> Tensor:
    """See `plain.quadratic_forms`."""
    heads, rows, size = x.shape
    if x.dtype not in KINDS or size > _MAX_HEAD_DIM or x.stride(2) != 1:
        return plain_torch.quadratic_forms(x, matrices, most)
    found = torch.zeros((heads, matrices.shape[1], rows))
    at = torch.arange(max(rows, size))
    given = Queries(matrices.contiguous(), at[:size], None, at[:0])
    _run(_FORM, given, (x, at[None, :rows], None), mass=found)
    return found


def _fits(queries: Queries, part: Part) -> bool:
    """Whether C supports these queries and keys."""
    q, k, rows = queries.q, part[0], part[1:]
    known = q.dtype == k.dtype and q.dtype in KINDS and q.shape[3] <= _MAX_HEAD_DIM
    listed = all(x.dtype == torch.int64 and (x.stride(1) == 1 or x.shape[1] == 1) for x in rows)
    listed = listed and queries.at.dtype == torch.int64
    return known and listed and q.stride(3) == k.stride(-1) == 1 and q.is_cpu


def _run(
    made: int,
    queries: Queries,
    part: tuple[Tensor, Tensor, Tensor | None],
    *,
    mass: Tensor | None = None,
    squares: Tensor | None = None,
    each: Tensor | None = None,
) -> None:
    (q, q_pos, window, lse), (k, k_pos, index) = queries, part
    heads, group, rows, size = q.shape
    keys = k_pos.shape[1]
    if not q.numel() or not keys:
        return
    assert lse is not None
    lse = lse.float().contiguous()
    lists = 0 if index is None else index.stride(0), 0 if len(k_pos) == 1 else k_pos.stride(0)
    shape = Struct(
        *(heads, group, rows, keys, size, window or 0, KINDS[k.dtype], KINDS[q.dtype], made),
        *(*q.stride()[:3], q_pos.stride(0), k.stride(0) if index is None else 0, k.stride(-2)),
        *lists,
        *((0, 0) if mass is None else mass.stride()[:2]),
        0 if squares is None else squares.stride(0),
        *((0, 0, 0) if each is None else each.stride()[:3]),
    )
    _attention_mass(Struct(q, k, q_pos, k_pos, index, lse, mass, squares, each), shape)
