"""Eviction before attention, in C, for all layers in one call: `overwrite.c`.

A decode step passes contiguous tensors in main memory. Anything else is a bug and fails an
assertion.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from minikv.kernels.cpu.binding import address, loaded, plain
from minikv.kernels.torch.decode import Rows

_STREAMING, _L2, _RANDOM = range(3)
_TAKES = "overwrite in C takes contiguous CPU tensors: "


@cache
def _library() -> ctypes.CDLL:
    """The library, the arguments of its function declared."""
    found, p, n = loaded(), c_void_p, c_int64
    found.minikv_overwrite.argtypes = [c_int, n, n, *[p] * 5, n, n, n, p, n, p, p, n, p, p, p]
    found.minikv_overwrite.restype = c_int
    return found


def streaming_step(
    rows: Rows,
    free_slot: Tensor,
    slot: Tensor,
    columns: Mapping[str, Tensor],
    undo_rows: Mapping[str, Tensor],
) -> None:
    """`overwrite_step` of StreamingLLM (arXiv 2309.17453): the oldest row but the sinks leaves. The
    tensors of heads are [L, H], for all layers. Raises MemoryError."""
    _overwrite(_STREAMING, rows, free_slot, slot, columns, undo_rows)


def l2_step(
    rows: Rows,
    free_slot: Tensor,
    slot: Tensor,
    columns: Mapping[str, Tensor],
    undo_rows: Mapping[str, Tensor],
    norm: Tensor,
) -> None:
    """As `streaming_step`, for L2 (arXiv 2406.11430): the row with the largest norm leaves. norm
    float32 [R]: the length of each key."""
    _overwrite(_L2, rows, free_slot, slot, columns, undo_rows, norm=norm)


def random_step(
    rows: Rows,
    free_slot: Tensor,
    slot: Tensor,
    columns: Mapping[str, Tensor],
    undo_rows: Mapping[str, Tensor],
    seed: int,
) -> None:
    """As `streaming_step`, for Random: the row with the smallest random number leaves."""
    _overwrite(_RANDOM, rows, free_slot, slot, columns, undo_rows, seed=seed)


def _overwrite(
    rule: int,
    rows: Rows,
    free_slot: Tensor,
    slot: Tensor,
    columns: Mapping[str, Tensor],
    undo_rows: Mapping[str, Tensor],
    *,
    norm: Tensor | None = None,
    seed: int = 0,
) -> None:
    """Call C once."""
    heads = (rows.start, rows.length, rows.cap, free_slot, slot)
    assert plain(torch.int64, *heads, rows.newest), _TAKES + "int64 layouts"
    assert plain(torch.int32, rows.pos), _TAKES + "int32 positions"
    assert norm is None or plain(torch.float32, norm), _TAKES + "a float32 norm"
    count = len(undo_rows)
    for name, saved in undo_rows.items():
        assert plain(saved.dtype, saved, columns[name]), _TAKES + "columns"
        assert saved.shape == (free_slot.numel(), *columns[name].shape[1:])
    failed = _library().minikv_overwrite(
        rule,
        *free_slot.shape,
        *(t.data_ptr() for t in (rows.start, rows.length, rows.cap, rows.pos, rows.newest)),
        rows.sinks,
        rows.recent,
        rows.pinned,
        address(norm),
        seed,
        free_slot.data_ptr(),
        slot.data_ptr(),
        count,
        (c_void_p * count)(*(columns[name].data_ptr() for name in undo_rows)),
        (c_void_p * count)(*(saved.data_ptr() for saved in undo_rows.values())),
        (c_int64 * count)(*(saved[0].numel() * saved.itemsize for saved in undo_rows.values())),
    )
    if failed:
        raise MemoryError("a step found no memory")
