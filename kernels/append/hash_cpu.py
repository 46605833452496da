"""HashEvict (arXiv 2412.16187, section 3) before attention, in C: `hash_append.c`.

A decode step passes contiguous tensors in main memory, and codes of at most 64 bits. Anything else
is a bug and fails an assertion.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p
from functools import cache

import torch

from minikv.kernels.decode.plain import HashRule, NewRow
from minikv.kernels.native.binding import FLOAT16, KINDS, loaded, plain

_KINDS = {**KINDS, torch.float16: FLOAT16}
_CODE_BYTES = {torch.int16: 2, torch.int32: 4, torch.int64: 8}
_MAX_BITS = 64
_COLUMNS = {"k", "v", "pos", "code"}
_TAKES = "hash_append in C takes contiguous CPU tensors: "


@cache
def _library() -> ctypes.CDLL:
    """The library, the arguments of its functions declared."""
    found = loaded()
    p, i, n = c_void_p, c_int, c_int64
    found.minikv_hash_append.argtypes = [i, i] + [n] * 4 + [p] * 13 + [n] * 4
    found.minikv_hash_append.restype = c_int
    return found


def hash_append(rule: HashRule, new: NewRow) -> bool:
    """Write each head's new row; in a full head, over the row whose code is least like the probes.
    False, with nothing done, if there are columns that C does not write. Raises MemoryError."""
    columns, key = new.columns, new.key
    if {*columns} != _COLUMNS or new.shown is not columns["pos"] or new.turn is not None:
        return False
    probe = key[:, None] if rule.hash_with == "key" else new.query
    matrix = rule.matrix(new.layer, key)
    k, v, pos, code = (columns[name] for name in ("k", "v", "pos", "code"))
    dtype = key.dtype
    assert dtype in _KINDS, f"hash_append in C takes no {dtype}"
    assert code.dtype in _CODE_BYTES, f"hash_append in C takes no codes of {code.dtype}"
    assert matrix.shape[1] <= _MAX_BITS, f"codes have at most {_MAX_BITS} bits"
    assert key.shape == new.value.shape, "keys and values have the same size"
    assert k.shape[1] == v.shape[1], "keys and values have the same size"
    assert plain(dtype, probe, key, new.value, k, v), _TAKES + "rows of one dtype"
    assert plain(torch.float32, matrix), _TAKES + "a float32 matrix"
    tables = new.start, new.length, new.cap, new.free_slot, new.position
    assert plain(torch.int64, *tables), _TAKES + "int64 layouts"
    assert plain(torch.int32, pos), _TAKES + "int32 positions"
    assert plain(code.dtype, code), _TAKES + "codes"
    heads, probes, size = probe.shape
    tensors = probe, key, new.value, matrix, *tables, k, v, pos, code
    failed = _library().minikv_hash_append(
        _KINDS[dtype],
        _CODE_BYTES[code.dtype],
        heads,
        probes,
        size,
        matrix.shape[1],
        *[t.data_ptr() for t in tensors],
        new.width,
        rule.sinks,
        rule.recent,
        new.pinned,
    )
    if failed:
        raise MemoryError("a step found no memory")
    return True
