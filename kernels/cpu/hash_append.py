"""HashEvict (arXiv 2412.16187, section 3) before attention, in C: `hash_append.c`.

A decode step passes contiguous tensors in main memory, and codes of at most 64 bits. Anything else
is a bug and fails an assertion.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from minikv.kernels.cpu.binding import FLOAT16, KINDS, loaded, plain

_KINDS = {**KINDS, torch.float16: FLOAT16}
_CODE_BYTES = {torch.int16: 2, torch.int32: 4, torch.int64: 8}
_MAX_BITS = 64
_TAKES = "hash_append in C takes contiguous CPU tensors: "


@cache
def _library() -> ctypes.CDLL:
    """The library, the arguments of its functions declared."""
    found = loaded()
    p, i, n = c_void_p, c_int, c_int64
    found.minikv_hash_append.argtypes = [i, i] + [n] * 4 + [p] * 17 + [n] * 4
    found.minikv_hash_append.restype = c_int
    return found


def hash_append(
    probe: Tensor,
    key: Tensor,
    value: Tensor,
    matrix: Tensor,
    start: Tensor,
    length: Tensor,
    cap: Tensor,
    free_slot: Tensor,
    position: Tensor,
    k: Tensor,
    v: Tensor,
    pos: Tensor,
    code: Tensor,
    undo_rows: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    width: int,
    sinks: int,
    recent: int,
    pinned: int,
) -> None:
    """Write each head's new row; in a full head, over the row whose code is least like the probes.

    probe [H, P, D], key and value [H, D], matrix float32 [D, B], start, length, cap, free_slot
    int64 [H], position int64 []; k, v [R, D], pos int32 [R], code [R]. undo_rows (k, v, pos and
    code of each head) gets the row that is overwritten, free_slot its index. Raises MemoryError.
    """
    dtype = key.dtype
    assert dtype in _KINDS, f"hash_append in C takes no {dtype}"
    assert code.dtype in _CODE_BYTES, f"hash_append in C takes no codes of {code.dtype}"
    assert matrix.shape[1] <= _MAX_BITS, f"codes have at most {_MAX_BITS} bits"
    assert key.shape == value.shape, "keys and values have the same size"
    assert k.shape[1] == v.shape[1], "keys and values have the same size"
    assert plain(dtype, probe, key, value, k, v, *undo_rows[:2]), _TAKES + "rows of one dtype"
    assert plain(torch.float32, matrix), _TAKES + "a float32 matrix"
    assert plain(torch.int64, start, length, cap, free_slot, position), _TAKES + "int64 layouts"
    assert plain(torch.int32, pos, undo_rows[2]), _TAKES + "int32 positions"
    assert plain(code.dtype, code, undo_rows[3]), _TAKES + "codes of one dtype"
    heads, probes, size = probe.shape
    tensors = (probe, key, value, matrix, start, length, cap, free_slot, position, k, v, pos, code)
    failed = _library().minikv_hash_append(
        _KINDS[dtype],
        _CODE_BYTES[code.dtype],
        heads,
        probes,
        size,
        matrix.shape[1],
        *[t.data_ptr() for t in (*tensors, *undo_rows)],
        width,
        sinks,
        recent,
        pinned,
    )
    if failed:
        raise MemoryError("a step found no memory")
