"""After a prompt, in Triton: copy the rows that stay to the segments of their heads.

Only the device knows how many rows a head keeps. The grid covers the most that a head may keep, and
a program beyond a head's count ends at once. Rows of earlier turns are read from a copy, because
other rows may overwrite them. Specification: `plain.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.gpu import head_stride, in_rows, power, row_stride

_ROWS = 32  # rows that one program copies
_VALUES = 1024


@triton.jit(
    do_not_specialize="index_head new_head new_row at_head pos_head before".split(),
    do_not_specialize_on_alignment=["pos"],
)
def _rows(
    index,
    count,
    start,
    k,
    v,
    old_k,
    old_v,
    at,
    out_k,
    out_v,
    pos,
    out_pos,
    index_head,
    new_head,
    new_row,
    at_head,
    pos_head,
    before,
    D: tl.constexpr,
    DP: tl.constexpr,
    BN: tl.constexpr,
    OLD: tl.constexpr,
):
    h = tl.program_id(1).to(tl.int64)
    n = tl.load(count + h)
    if tl.program_id(0) * BN < n:
        j = tl.program_id(0) * BN + tl.arange(0, BN)
        real = j < n
        d = tl.arange(0, DP)
        narrow = (d < D)[None, :]
        row = tl.load(index + h * index_head + j, mask=real, other=0).to(tl.int64)
        into = tl.load(start + h) + j
        where = tl.load(pos + h * pos_head + row, mask=real, other=0)
        tl.store(out_pos + into, where.to(tl.int32), mask=real)
        target = into[:, None] * D + d[None, :]
        is_new = real & (row >= before)
        there = (h * new_head + (row - before) * new_row)[:, None] * D + d[None, :]
        key = tl.load(k + there, mask=is_new[:, None] & narrow, other=0.0)
        value = tl.load(v + there, mask=is_new[:, None] & narrow, other=0.0)
        if OLD:
            early = real & (row < before)
            place = tl.load(at + h * at_head + row, mask=early, other=0)[:, None] * D + d[None, :]
            old = early[:, None] & narrow
            key = tl.where(early[:, None], tl.load(old_k + place, mask=old, other=0.0), key)
            value = tl.where(early[:, None], tl.load(old_v + place, mask=old, other=0.0), value)
        tl.store(out_k + target, key, mask=real[:, None] & narrow)
        tl.store(out_v + target, value, mask=real[:, None] & narrow)


@triton.jit(do_not_specialize=["index_head", "values_head"])
def _columns(index, count, start, values, out, index_head, values_head, BN: tl.constexpr):
    h = tl.program_id(1).to(tl.int64)
    n = tl.load(count + h)
    if tl.program_id(0) * BN < n:
        j = tl.program_id(0) * BN + tl.arange(0, BN)
        real = j < n
        row = tl.load(index + h * index_head + j, mask=real, other=0)
        to = tl.load(start + h) + j
        for i in tl.static_range(len(values)):
            value = tl.load(values[i] + h * values_head + row, mask=real, other=0)
            tl.store(out[i] + to, value.to(out[i].dtype.element_ty), mask=real)


def gather_rows(
    index: Tensor,
    count: Tensor,
    start: Tensor,
    new: tuple[Tensor, Tensor],
    old: tuple[Tensor, Tensor, Tensor] | None,
    out: tuple[Tensor, Tensor],
    pos: tuple[Tensor, Tensor],
    max_count: int,
) -> None:
    """See `plain.gather_rows`."""
    k, v = (in_rows(t) for t in new)
    if v.stride() != k.stride():
        k, v = k.contiguous(), v.contiguous()
    if max_count == 0:
        return
    heads, _, size = k.shape
    old_k, old_v, at = (k, v, index) if old is None else old
    where = pos[0] if pos[0].stride(-1) == 1 else pos[0].contiguous()
    strides = index.stride(0), row_stride(k, 0), row_stride(k, 1), at.stride(0), head_stride(where)
    sizes = {"D": size, "DP": power(size), "BN": _ROWS}
    _rows[(-(-max_count // _ROWS), heads)](
        *(index, count, start, k, v, old_k, old_v, at, *out, where, pos[1]),
        *(*strides, 0 if old is None else at.shape[1]),
        **sizes,
        OLD=old is not None,
        num_warps=4,
    )


def gather_columns(
    index: Tensor,
    count: Tensor,
    start: Tensor,
    values: Sequence[Tensor],
    out: Sequence[Tensor],
    max_count: int,
) -> None:
    """See `plain.gather_columns`."""
    if max_count == 0 or not values:
        return
    assert len({column.shape for column in values}) == 1
    assert all(column.is_contiguous() for column in out)
    columns, strides = tuple(map(_aligned, values)), (index.stride(0), values[0].shape[1])
    grid = -(-max_count // _VALUES), len(index)
    _columns[grid](index, count, start, columns, tuple(out), *strides, BN=_VALUES, num_warps=4)


def _aligned(column: Tensor) -> Tensor:
    """`column`, copied if it is not contiguous or not aligned to 16 bytes, which would need another
    build."""
    column = column.contiguous()
    return column if column.data_ptr() % 16 == 0 else column.clone()
