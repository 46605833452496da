"""The end of a step in C: `evict.c` behind the signatures of the torch twins.

What the C does not take (other dtypes, strides, more than 64 bits of code) goes to the twin.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from minikv.kernels.cpu.build import library
from minikv.kernels.torch import reference
from minikv.kernels.torch.reference import Rows

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CODES = {torch.int16: 2, torch.int32: 4, torch.int64: 8}
_BITS = 64  # of a code

Heads = tuple[int, ...]
"""What every policy's function in C begins with."""


@cache
def _bound() -> ctypes.CDLL:
    """The library, its arguments declared."""
    found, why = library()
    assert found is not None, why
    p, i, n = c_void_p, c_int, c_int64
    heads = [n] * 4 + [p] * 7 + [n] * 3 + [p] * 2
    found.minikv_h2o_step.argtypes = [*heads, p, p]
    found.minikv_tova_step.argtypes = [*heads, i]
    found.minikv_roco_step.argtypes = [*heads, p, p, p, p]
    found.minikv_scissorhands_step.argtypes = [*heads, n, p, p, n, p]
    found.minikv_hash_append.argtypes = [i, i] + [n] * 4 + [p] * 17 + [n] * 4
    for name in ("h2o_step", "tova_step", "roco_step", "scissorhands_step", "hash_append"):
        getattr(found, f"minikv_{name}").restype = c_int
    return found


def h2o_step(
    logits: Tensor, lse: Tensor, rows: Rows, go: Tensor, hole: Tensor, sums: Tensor, young: Tensor
) -> None:
    """See `reference.h2o_step`."""
    heads = _heads(logits, lse, rows, go, hole)
    if heads is None or not (_floats(sums) and _longs(young)):
        reference.h2o_step(logits, lse, rows, go, hole, sums, young)
        return
    _done(_bound().minikv_h2o_step(*heads, sums.data_ptr(), young.data_ptr()))


def tova_step(
    logits: Tensor, lse: Tensor, rows: Rows, go: Tensor, hole: Tensor, *, layerwise: bool
) -> None:
    """See `reference.tova_step`."""
    heads = _heads(logits, lse, rows, go, hole)
    if heads is None:
        reference.tova_step(logits, lse, rows, go, hole, layerwise=layerwise)
        return
    _done(_bound().minikv_tova_step(*heads, layerwise))


def roco_step(
    logits: Tensor,
    lse: Tensor,
    rows: Rows,
    go: Tensor,
    hole: Tensor,
    sums: Tensor,
    squares: Tensor,
    count: Tensor,
    keep: Tensor,
) -> None:
    """See `reference.roco_step`."""
    heads = _heads(logits, lse, rows, go, hole)
    if heads is None or not (_floats(sums, squares, count) and _longs(keep)):
        reference.roco_step(logits, lse, rows, go, hole, sums, squares, count, keep)
        return
    _done(
        _bound().minikv_roco_step(
            *heads, sums.data_ptr(), squares.data_ptr(), count.data_ptr(), keep.data_ptr()
        )
    )


def scissorhands_step(
    logits: Tensor,
    lse: Tensor,
    rows: Rows,
    go: Tensor,
    hole: Tensor,
    words: Sequence[Tensor],
    queries: Tensor,
    history: int,
    window: Tensor,
) -> None:
    """See `reference.scissorhands_step`."""
    heads = _heads(logits, lse, rows, go, hole)
    if heads is None or not (_longs(window, *words) and _floats(queries)):
        reference.scissorhands_step(logits, lse, rows, go, hole, words, queries, history, window)
        return
    count = len(words)
    places = (c_void_p * count)(*[word.data_ptr() for word in words])
    _done(
        _bound().minikv_scissorhands_step(
            *heads, count, places, queries.data_ptr(), history, window.data_ptr()
        )
    )


def hash_append(
    probe: Tensor,
    key: Tensor,
    value: Tensor,
    matrix: Tensor,
    start: Tensor,
    length: Tensor,
    cap: Tensor,
    hole: Tensor,
    position: Tensor,
    k: Tensor,
    v: Tensor,
    pos: Tensor,
    code: Tensor,
    spare: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    width: int,
    sinks: int,
    recent: int,
    pinned: int,
) -> None:
    """See `reference.hash_append`."""
    dtype, kind = code.dtype, key.dtype
    fits = (
        kind in _KINDS
        and dtype in _CODES
        and matrix.shape[1] <= _BITS
        and key.shape == value.shape
        and k.shape[1] == v.shape[1]
        and _plain(kind, probe, key, value, k, v, spare[0], spare[1])
        and _floats(matrix)
        and _longs(start, length, cap, hole, position)
        and _plain(torch.int32, pos, spare[2])
        and _plain(dtype, code, spare[3])
    )
    if not fits:
        reference.hash_append(
            probe,
            key,
            value,
            matrix,
            start,
            length,
            cap,
            hole,
            position,
            k,
            v,
            pos,
            code,
            spare,
            width=width,
            sinks=sinks,
            recent=recent,
            pinned=pinned,
        )
        return
    heads, probes, size = probe.shape
    _done(
        _bound().minikv_hash_append(
            _KINDS[kind],
            _CODES[dtype],
            heads,
            probes,
            size,
            matrix.shape[1],
            *[
                t.data_ptr()
                for t in (
                    probe,
                    key,
                    value,
                    matrix,
                    start,
                    length,
                    cap,
                    hole,
                    position,
                    k,
                    v,
                    pos,
                    code,
                    *spare,
                )
            ],
            width,
            sinks,
            recent,
            pinned,
        )
    )


def _heads(logits: Tensor, lse: Tensor, rows: Rows, go: Tensor, hole: Tensor) -> Heads | None:
    """The heads as C takes them, None where it does not."""
    start, length, cap, pos, newest = rows.start, rows.length, rows.cap, rows.pos, rows.newest
    fits = (
        _floats(logits, lse)
        and _longs(start, length, cap, newest, hole)
        and _plain(torch.int32, pos)
        and _plain(torch.bool, go)
    )
    if not fits:
        return None
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
        go.data_ptr(),
        hole.data_ptr(),
    )


def _floats(*tensors: Tensor) -> bool:
    return _plain(torch.float32, *tensors)


def _longs(*tensors: Tensor) -> bool:
    return _plain(torch.int64, *tensors)


def _plain(dtype: torch.dtype, *tensors: Tensor) -> bool:
    """Whether these are contiguous tensors of a dtype on the host."""
    return all(t.dtype is dtype and t.is_contiguous() and t.is_cpu for t in tensors)


def _done(failed: int) -> None:
    if failed:
        raise MemoryError("the end of a step found no memory")
