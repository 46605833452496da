"""The policies' columns of the rows from before a prompt, in Triton: all of them in one launch.

Specification: `torch/columns.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.triton.tiles import typed
from minikv.kernels.triton.variants import Variant

_BLOCK = 256


@triton.jit(do_not_specialize=["rows", "wide"], do_not_specialize_on_alignment=["index", "live"])
def _carried_columns(columns, index, live, out, rows, wide, BN: tl.constexpr):
    h = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    held = tl.load(live + h * rows + j, mask=j < rows, other=0) != 0
    row = tl.load(index + h * rows + j, mask=held, other=0)
    for i in tl.static_range(len(columns)):
        value = tl.load(columns[i] + row, mask=held, other=0)
        tl.store(out[i] + h * wide + j, value, mask=j < wide)


def carried_columns(
    columns: Sequence[Tensor], index: Tensor, live: Tensor, new: int
) -> list[Tensor]:
    """See `torch.columns.carried_columns`."""
    assert index.is_contiguous()
    assert live.is_contiguous()
    assert all(column.is_contiguous() for column in columns)
    heads, rows = index.shape
    wide = rows + new
    out = [column.new_empty((heads, wide)) for column in columns]
    if out:
        grid = max(1, -(-wide // _BLOCK)), heads
        _carried_columns[grid](tuple(columns), index, live, tuple(out), rows, wide, BN=_BLOCK)
    return out


def variants() -> list[Variant]:
    """Builds for the compile gate, with the columns of some policies."""
    constants: dict[str, object] = {"BN": _BLOCK}
    found = []
    for name, columns in (
        ("roco", ("*fp32",) * 3),
        ("scissorhands", (*("*i64",) * 13, "*fp32")),
        ("hashevict", ("*i32",)),
    ):
        kinds: dict[str, str | tuple[str, ...]] = {"columns": columns, "out": columns}
        kinds |= {"index": "*i64", "live": "*i1"}
        signature = typed(_carried_columns, kinds, constants)
        found.append(Variant(f"carried-columns-{name}", _carried_columns, signature, constants))
    return found
