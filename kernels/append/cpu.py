"""Write the row of a new token, in C (`append.c`), or under HashEvict (arXiv 2412.16187, section 3)
first choose the row that it overwrites (`hash_append.c`). plain.py takes other dtypes and strides.

For HashEvict a step passes contiguous tensors in main memory, and codes of at most 64 bits.
Anything else is a bug and fails an assertion.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from minikv.kernels.append import plain as plain_torch
from minikv.kernels.append.plain import Slots
from minikv.kernels.decode.plain import HashRule, NewRow
from minikv.kernels.native.binding import FLOAT16, KINDS, address, loaded, plain

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
    found.minikv_append.argtypes = [i, i, i, p, n, p, n, p, p, p, p, p, p, p, i, p, p]
    found.minikv_append.restype = None
    found.minikv_rotate_append.argtypes = [i, i, i, i, p, p, p, p, p, p, p, p, p, p, i, p, p, p]
    found.minikv_rotate_append.restype = None
    found.minikv_advance.argtypes = [n, i] + [p] * 7
    found.minikv_advance.restype = None
    found.minikv_hash_append.argtypes = [i, i] + [n] * 4 + [p] * 13 + [n] * 4
    found.minikv_hash_append.restype = c_int
    return found


def append(key: Tensor, value: Tensor, new: Slots) -> None:
    """See `plain.append`."""
    slot, position, k, v, pos, blank, k_scale, v_scale = new
    kind, coded = KINDS.get(key.dtype, -1), k_scale is not None
    dense = key.stride(1) == 1 == value.stride(1)
    if kind < 0 or not dense or not (coded or k.dtype == key.dtype):
        plain_torch.append(key, value, new)
        return
    _library().minikv_append(
        kind,
        len(slot),
        key.shape[1],
        key.data_ptr(),
        key.stride(0),
        value.data_ptr(),
        value.stride(0),
        slot.data_ptr(),
        position.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        pos.data_ptr(),
        address(k_scale),
        address(v_scale),
        *_columns(blank),
    )


def _columns(blank: Sequence[Tensor]) -> tuple[int, Any, Any]:
    """How many columns, their addresses, and the bytes of a number of each."""
    count = len(blank)
    addresses = (c_void_p * count)(*(column.data_ptr() for column in blank))
    return count, addresses, (ctypes.c_int32 * count)(*(column.itemsize for column in blank))


def rotate_append(qkv: Tensor, cos: Tensor, sin: Tensor, new: Slots) -> tuple[Tensor, Tensor]:
    """See `plain.rotate_append`."""
    slot, position, k, v, pos, blank, k_scale, v_scale = new
    heads, size = len(slot), qkv.shape[1]
    kind, coded = KINDS.get(qkv.dtype, -1), k_scale is not None
    if kind < 0 or not plain(qkv.dtype, qkv, cos, sin) or not (coded or k.dtype == qkv.dtype):
        return plain_torch.rotate_append(qkv, cos, sin, new)
    turned = torch.empty((len(qkv) - heads, size), dtype=qkv.dtype)
    _library().minikv_rotate_append(
        kind,
        heads,
        len(qkv),
        size,
        qkv.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        slot.data_ptr(),
        position.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        pos.data_ptr(),
        address(k_scale),
        address(v_scale),
        *_columns(blank),
        turned.data_ptr(),
    )
    return turned[:-heads].view(heads, -1, size), turned[-heads:]


def advance(
    start: Tensor,
    length: Tensor,
    cap: Tensor,
    free_slot: Tensor,
    position: Tensor,
    count: Tensor,
    slot: Tensor,
    *,
    before: bool,
) -> None:
    """See `plain.advance`."""
    tensors = start, length, cap, free_slot, position, count, slot
    _library().minikv_advance(length.numel(), before, *(t.data_ptr() for t in tensors))


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


append_evict = {"hashevict": hash_append}
