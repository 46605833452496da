"""The end of a decode step, in C (`step.c`): update the statistics of all rows, and choose the
victim of each head over its cap.

A decode step passes contiguous tensors in main memory: float32 logits, scores and statistics, int32
positions, int64 layouts. Anything else is a bug and fails an assertion.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from minikv.kernels.decode.plain import Rows
from minikv.kernels.native.binding import function, plain

_TAKES = "the C step kernels take contiguous CPU tensors: "
_HEADS = "nnnn" + "p" * 7 + "nnnp"
_STEPS = {
    "h2o": function("h2o_step", _HEADS + "pp", "the end of a step"),
    "roco": function("roco_step", _HEADS + "pppp", "the end of a step"),
}
_lowest = function("lowest", "nnppppp")


def lowest(scores: Tensor, pos: Tensor, start: Tensor, over: Tensor, free_slot: Tensor) -> None:
    """See `decode.plain.lowest`."""
    scores = scores.contiguous()
    assert plain(torch.float32, scores), _TAKES + "float32 scores"
    assert plain(torch.bool, over), _TAKES + "bool over"
    assert plain(torch.int64, pos, start, free_slot), _TAKES + "int64 layouts and positions"
    assert scores.shape == pos.shape, "there is a score for every row"
    _lowest(*scores.shape, scores, pos, start, over, free_slot)


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
    ends = rows.sinks, rows.recent, rows.pinned
    heads = logits, lse, *tables, rows.pos, rows.newest, *ends, free_slot
    _STEPS[name](*logits.shape, *heads, *columns, quota)


evict = {name: partial(_step, name) for name in _STEPS}
