"""After a prompt, in Triton: the rows that stay move out the segments of their heads.

How many rows a head keeps is known on the device only. The grid covers the most that it may keep;
a program beyond a head's count ends at once. Rows of earlier turns are read from a copy, because
other rows may be written where they were. Specification: `torch/compaction.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.triton.tiles import in_rows, power, row_stride, typed
from minikv.kernels.triton.variants import WIDE, Variant

_ROWS = 32  # that one program moves
_VALUES = 1024


@triton.jit(
    do_not_specialize=[
        "index_head",
        "new_head",
        "new_row",
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
    out_k,
    out_v,
    index_head,
    new_head,
    new_row,
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
        target = (tl.load(start + h) + j)[:, None] * D + d[None, :]
        is_new = real & (row >= before)
        there = (h * new_head + (row - before) * new_row)[:, None] * D + d[None, :]
        key = tl.load(k + there, mask=is_new[:, None] & narrow, other=0.0)
        value = tl.load(v + there, mask=is_new[:, None] & narrow, other=0.0)
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
        tl.store(out_k + target, key, mask=real[:, None] & narrow)
        tl.store(out_v + target, value, mask=real[:, None] & narrow)


@triton.jit(do_not_specialize=["index_head", "values_head"])
def _column(index, count, start, values, out, index_head, values_head, BN: tl.constexpr):
    h = tl.program_id(1).to(tl.int64)
    n = tl.load(count + h)
    if tl.program_id(0) * BN < n:
        j = tl.program_id(0) * BN + tl.arange(0, BN)
        real = j < n
        row = tl.load(index + h * index_head + j, mask=real, other=0)
        value = tl.load(values + h * values_head + row, mask=real, other=0)
        tl.store(out + tl.load(start + h) + j, value.to(out.dtype.element_ty), mask=real)


def gather_rows(
    index: Tensor,
    count: Tensor,
    start: Tensor,
    new: tuple[Tensor, Tensor],
    old: tuple[Tensor, Tensor, Tensor] | None,
    out: tuple[Tensor, Tensor],
    max_count: int,
) -> None:
    """See `torch.compaction.gather_rows`."""
    k, v = (in_rows(t) for t in new)
    if v.stride() != k.stride():
        k, v = k.contiguous(), v.contiguous()
    if max_count == 0:
        return
    heads, _, size = k.shape
    old_k, old_v, at = (k, v, index) if old is None else old
    _rows[(-(-max_count // _ROWS), heads)](
        index,
        count,
        start,
        k,
        v,
        old_k,
        old_v,
        at,
        *out,
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
    index: Tensor, count: Tensor, start: Tensor, values: Tensor, out: Tensor, max_count: int
) -> None:
    """See `torch.compaction.gather_column`."""
    if max_count == 0:
        return
    values = values if values.stride(-1) == 1 else values.contiguous()
    _column[(-(-max_count // _VALUES), len(index))](
        index,
        count,
        start,
        values,
        out,
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
        data = dict.fromkeys(("k", "v", "old_k", "old_v", "out_k", "out_v"), f"*{kind}")
        constants: dict[str, object] = {"D": size, "DP": power(size), "BN": _ROWS, "OLD": old}
        found.append(
            Variant(
                f"rows-{kind}-d{size}" + "-old" * old,
                _rows,
                typed(_rows, lists | {"at": "*i64"} | data, constants),
                constants,
                reads=dict.fromkeys(("k", "v", *(("old_k", "old_v") if old else ())), WIDE),
            )
        )
    kinds, constants = lists | {"values": "*i64", "out": "*i32"}, {"BN": _VALUES}
    signature = typed(_column, kinds, constants)
    return [*found, Variant("column", _column, signature, constants)]
