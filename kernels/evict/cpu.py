"""The end of a decode step, in C (`step.c`): update the statistics of all rows, and choose the
victim of each head that is over its cap.

A decode step passes contiguous tensors in main memory: float32 logits, scores and statistics, int32
positions, int64 layouts. Anything else is a bug and fails an assertion.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int, c_int64, c_void_p
from functools import cache, partial

import torch
from torch import Tensor

from minikv.kernels.decode.plain import Rows
from minikv.kernels.native.binding import loaded, plain

_TAKES = "the C step kernels take contiguous CPU tensors: "


@cache
def _library() -> ctypes.CDLL:
    """The library, the arguments of its functions declared."""
    found = loaded()
    p, n = c_void_p, c_int64
    heads = [n] * 4 + [p] * 7 + [n] * 3 + [p]
    found.minikv_h2o_step.argtypes = [*heads, p, p]
    found.minikv_roco_step.argtypes = [*heads, p, p, p, p]
    for name in ("h2o_step", "roco_step"):
        getattr(found, f"minikv_{name}").restype = c_int
    found.minikv_lowest.argtypes = [n, n] + [p] * 5
    found.minikv_lowest.restype = None
    return found


def lowest(scores: Tensor, pos: Tensor, start: Tensor, over: Tensor, free_slot: Tensor) -> None:
    """See `decode.plain.lowest`."""
    scores = scores.contiguous()
    assert plain(torch.float32, scores), _TAKES + "float32 scores"
    assert plain(torch.bool, over), _TAKES + "bool over"
    assert plain(torch.int64, pos, start, free_slot), _TAKES + "int64 layouts and positions"
    assert scores.shape == pos.shape, "there is a score for every row"
    tensors = scores, pos, start, over, free_slot
    _library().minikv_lowest(*scores.shape, *(t.data_ptr() for t in tensors))


def _step(
    name: str,
    logits: Tensor,
    lse: Tensor,
    rows: Rows,
    free_slot: Tensor,
    columns: Sequence[Tensor],
    quota: Tensor,
) -> None:
    """See `plain.evict`. Raises MemoryError."""
    tables = rows.start, rows.length, rows.cap
    assert plain(torch.float32, logits, lse, *columns), _TAKES + "float32 logits and statistics"
    assert plain(torch.int64, *tables, rows.newest, free_slot, quota), _TAKES + "int64 layouts"
    assert plain(torch.int32, rows.pos), _TAKES + "int32 positions"
    failed = getattr(_library(), f"minikv_{name}_step")(
        *logits.shape,
        *(t.data_ptr() for t in (logits, lse, *tables, rows.pos, rows.newest)),
        rows.sinks,
        rows.recent,
        rows.pinned,
        *(t.data_ptr() for t in (free_slot, *columns, quota)),
    )
    if failed:
        raise MemoryError("the end of a step found no memory")


evict = {name: partial(_step, name) for name in ("h2o", "roco")}
