"""Survivors of a prompt move into their segments: rows by index lists that only the device knows.

The grid covers the most rows that a head may keep; a program beyond a head's count ends at once.
Rows of earlier turns are read from a copy, since others may go where they lay.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.triton.tiles import in_rows, power, row_stride, typed
from minikv.kernels.triton.variants import Variant

_ROWS = 32  # that one program moves, of k and of v
_VALUES = 1024


@triton.jit(
    do_not_specialize=[
        "index_head",
        "fresh_head",
        "fresh_row",
        "at_head",
        "before",
    ]
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
    into_k,
    into_v,
    index_head,
    fresh_head,
    fresh_row,
    at_head,
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
        here = (tl.load(start + h) + j)[:, None] * D + d[None, :]
        fresh = real & (row >= before)
        there = (h * fresh_head + (row - before) * fresh_row)[:, None] * D + d[None, :]
        key = tl.load(k + there, mask=fresh[:, None] & narrow, other=0.0)
        value = tl.load(v + there, mask=fresh[:, None] & narrow, other=0.0)
        if OLD:
            early = real & (row < before)
            place = tl.load(at + h * at_head + row, mask=early, other=0)[:, None] * D + d[None, :]
            key = tl.where(
                early[:, None], tl.load(old_k + place, mask=early[:, None] & narrow, other=0.0), key
            )
            value = tl.where(
                early[:, None],
                tl.load(old_v + place, mask=early[:, None] & narrow, other=0.0),
                value,
            )
        tl.store(into_k + here, key, mask=real[:, None] & narrow)
        tl.store(into_v + here, value, mask=real[:, None] & narrow)


@triton.jit(do_not_specialize=["index_head", "values_head"])
def _column(index, count, start, values, into, index_head, values_head, BN: tl.constexpr):
    h = tl.program_id(1).to(tl.int64)
    n = tl.load(count + h)
    if tl.program_id(0) * BN < n:
        j = tl.program_id(0) * BN + tl.arange(0, BN)
        real = j < n
        row = tl.load(index + h * index_head + j, mask=real, other=0)
        value = tl.load(values + h * values_head + row, mask=real, other=0)
        tl.store(into + tl.load(start + h) + j, value.to(into.dtype.element_ty), mask=real)


def gather_rows(
    index: Tensor,
    count: Tensor,
    start: Tensor,
    fresh: tuple[Tensor, Tensor],
    old: tuple[Tensor, Tensor, Tensor] | None,
    into: tuple[Tensor, Tensor],
    most: int,
) -> None:
    """As `reference.gather_rows`."""
    k, v = (in_rows(t) for t in fresh)
    if v.stride() != k.stride():
        k, v = k.contiguous(), v.contiguous()
    if most == 0:
        return
    heads, _, size = k.shape
    old_k, old_v, at = (k, v, index) if old is None else old
    _rows[(-(-most // _ROWS), heads)](
        index,
        count,
        start,
        k,
        v,
        old_k,
        old_v,
        at,
        *into,
        index.stride(0),
        row_stride(k, 0),
        row_stride(k, 1),
        at.stride(0),
        0 if old is None else at.shape[1],
        D=size,
        DP=power(size),
        BN=_ROWS,
        OLD=old is not None,
        num_warps=4,
    )


def gather_column(
    index: Tensor, count: Tensor, start: Tensor, values: Tensor, into: Tensor, most: int
) -> None:
    """As `reference.gather_column`."""
    if most == 0:
        return
    values = values if values.stride(-1) == 1 else values.contiguous()
    _column[(-(-most // _VALUES), len(index))](
        index,
        count,
        start,
        values,
        into,
        index.stride(0),
        0 if len(values) == 1 else values.stride(0),
        BN=_VALUES,
        num_warps=4,
    )


def variants() -> list[Variant]:
    """Builds for the compile gate."""
    found = []
    lists = {"index": "*i64", "count": "*i64", "start": "*i64"}
    for size, kind, old in ((128, "bf16", True), (80, "fp32", False)):
        data = dict.fromkeys(("k", "v", "old_k", "old_v", "into_k", "into_v"), f"*{kind}")
        constants: dict[str, object] = {"D": size, "DP": power(size), "BN": _ROWS, "OLD": old}
        found.append(
            Variant(
                f"rows-{kind}-d{size}" + "-old" * old,
                _rows,
                typed(_rows, lists | {"at": "*i64"} | data, constants),
                constants,
            )
        )
    kinds, constants = lists | {"values": "*i64", "into": "*i32"}, {"BN": _VALUES}
    signature = typed(_column, kinds, constants)
    return [*found, Variant("column", _column, signature, constants, vector=False)]
