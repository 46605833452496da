"""The end of a decode step, in C (`step.c`): update the statistics of all rows, and choose the
victim of each head that is over its cap.

Every function writes the victims, rows of the arena, or -1, to free_slot int64 [L, H], and does
nothing if `accepted` is false. logits [L, H, G, C] and lse [L, H, G] are this step's. A decode step
passes contiguous tensors in main memory: float32 logits, scores and statistics, int32 positions,
int64 layouts. Anything else is a bug and fails an assertion. All raise MemoryError but lowest_step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from minikv.kernels.cpu.binding import loaded, plain
from minikv.kernels.torch.decode import Rows

_TAKES = "the C step kernels take contiguous CPU tensors: "
_STATISTICS = _TAKES + "float32 statistics and int64 row counts"

Heads = tuple[int, ...]
"""The first arguments of every C function but minikv_lowest_step."""


@cache
def _library() -> ctypes.CDLL:
    """The library, the arguments of its functions declared."""
    found = loaded()
    p, i, n = c_void_p, c_int, c_int64
    heads = [n] * 4 + [p] * 7 + [n] * 3 + [p] * 2
    found.minikv_h2o_step.argtypes = [*heads, p, p]
    found.minikv_tova_step.argtypes = [*heads, i]
    found.minikv_roco_step.argtypes = [*heads, p, p, p, p]
    found.minikv_scissorhands_step.argtypes = [*heads, n, p, p, n, p]
    for name in ("h2o_step", "tova_step", "roco_step", "scissorhands_step"):
        getattr(found, f"minikv_{name}").restype = c_int
    found.minikv_lowest_step.argtypes = [n, n] + [p] * 8
    found.minikv_lowest_step.restype = None
    return found


def lowest_step(
    scores: Tensor, allowed: Tensor, rows: Rows, accepted: Tensor, free_slot: Tensor
) -> None:
    """See `torch.decode.lowest_step`: the allowed row with the lowest score is the victim."""
    scores, allowed = scores.to(torch.float32).contiguous(), allowed.contiguous()
    assert plain(torch.float32, scores), _TAKES + "scores"
    assert plain(torch.bool, allowed, accepted), _TAKES + "bool allowed and accepted"
    assert plain(torch.int64, rows.start, rows.length, rows.cap, free_slot), (
        _TAKES + "int64 layouts"
    )
    assert plain(torch.int32, rows.pos), _TAKES + "int32 positions"
    assert scores.shape == allowed.shape, "there is a score for every column"
    _library().minikv_lowest_step(
        free_slot.numel(),
        scores.shape[-1],
        scores.data_ptr(),
        allowed.data_ptr(),
        rows.start.data_ptr(),
        rows.length.data_ptr(),
        rows.cap.data_ptr(),
        rows.pos.data_ptr(),
        accepted.data_ptr(),
        free_slot.data_ptr(),
    )


def h2o_step(
    logits: Tensor,
    lse: Tensor,
    rows: Rows,
    accepted: Tensor,
    free_slot: Tensor,
    sums: Tensor,
    newest_rows: Tensor,
) -> None:
    """H2O (arXiv 2306.14048, section 4): add the step's probabilities to sums [R]; the row with the
    lowest sum is the victim. newest_rows int64 [L, H]: how many of a head's newest rows are kept.
    """
    assert plain(torch.float32, sums), _STATISTICS
    assert plain(torch.int64, newest_rows), _STATISTICS
    heads = _heads(logits, lse, rows, accepted, free_slot)
    _check(_library().minikv_h2o_step(*heads, sums.data_ptr(), newest_rows.data_ptr()))


def tova_step(
    logits: Tensor, lse: Tensor, rows: Rows, accepted: Tensor, free_slot: Tensor, *, layerwise: bool
) -> None:
    """TOVA (arXiv 2401.06104): the row with the lowest probability of this step is the victim.

    layerwise: the lowest mean of the probability over the heads of its layer.
    """
    heads = _heads(logits, lse, rows, accepted, free_slot)
    _check(_library().minikv_tova_step(*heads, layerwise))


def roco_step(
    logits: Tensor,
    lse: Tensor,
    rows: Rows,
    accepted: Tensor,
    free_slot: Tensor,
    sums: Tensor,
    squares: Tensor,
    count: Tensor,
    steady_rows: Tensor,
) -> None:
    """RoCo (arXiv 2402.06262, section 4.2): add the step's probability, its square and 1 to sums,
    squares and count [R]; of the rows with the smallest variances, the one with the lowest mean is
    the victim. steady_rows int64 [L, H]: how many rows with the smallest variances are candidates.
    """
    assert plain(torch.float32, sums, squares, count), _STATISTICS
    assert plain(torch.int64, steady_rows), _STATISTICS
    heads = _heads(logits, lse, rows, accepted, free_slot)
    _check(
        _library().minikv_roco_step(
            *heads, sums.data_ptr(), squares.data_ptr(), count.data_ptr(), steady_rows.data_ptr()
        )
    )


def scissorhands_step(
    logits: Tensor,
    lse: Tensor,
    rows: Rows,
    accepted: Tensor,
    free_slot: Tensor,
    words: Sequence[Tensor],
    queries: Tensor,
    history: int,
    window: Tensor,
) -> None:
    """ScissorHands (arXiv 2305.17118, section 4): set a bit for each row that got less than a
    uniform share of this step's attention; the row with the largest share of set bits is the
    victim.

    words int64 [R] each: together a shift register of `history` bits per row, 32 in each; queries
    [R]: how many of the bits are in use; window int64 [L]: rows that a query of the layer sees at
    most.
    """
    assert plain(torch.float32, queries), _STATISTICS
    assert plain(torch.int64, window, *words), _STATISTICS
    heads = _heads(logits, lse, rows, accepted, free_slot)
    count = len(words)
    columns = (c_void_p * count)(*[word.data_ptr() for word in words])
    _check(
        _library().minikv_scissorhands_step(
            *heads, count, columns, queries.data_ptr(), history, window.data_ptr()
        )
    )


def _heads(logits: Tensor, lse: Tensor, rows: Rows, accepted: Tensor, free_slot: Tensor) -> Heads:
    """The heads of all layers in the form that C takes."""
    start, length, cap, pos, newest = rows.start, rows.length, rows.cap, rows.pos, rows.newest
    assert plain(torch.float32, logits, lse), _TAKES + "float32 logits and lse"
    assert plain(torch.int64, start, length, cap, newest, free_slot), _TAKES + "int64 layouts"
    assert plain(torch.int32, pos), _TAKES + "int32 positions"
    assert plain(torch.bool, accepted), _TAKES + "bool accepted"
    return (
        *logits.shape,
        logits.data_ptr(),
        lse.data_ptr(),
        start.data_ptr(),
        length.data_ptr(),
        cap.data_ptr(),
        pos.data_ptr(),
        newest.data_ptr(),
        rows.sinks,
        rows.recent,
        rows.pinned,
        accepted.data_ptr(),
        free_slot.data_ptr(),
    )


def _check(failed: int) -> None:
    if failed:
        raise MemoryError("the end of a step found no memory")
