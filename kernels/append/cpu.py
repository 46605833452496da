"""Writes the row of a new token, in C (`append.c`). Under HashEvict (arXiv 2412.16187, section 3),
first chooses the row to overwrite (`hash_append.c`). plain.py handles other dtypes and strides.

For HashEvict a step passes contiguous tensors in main memory, and codes of at most 64 bits.
Anything else is a bug and fails an assertion.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int32

import torch
from torch import Tensor

from minikv.kernels.append import plain as plain_torch
from minikv.kernels.append.plain import Advancing, Slots
from minikv.kernels.decode.plain import HashRule, NewRow
from minikv.kernels.native.binding import FLOAT16, KINDS, Struct, function, plain

_KINDS = {**KINDS, torch.float16: FLOAT16}
_MAX_BITS = 64
_COLUMNS = {"k", "v", "pos", "code"}
_TAKES = "hash_append in C takes contiguous CPU tensors: "

_append = function("append", "pinpnpnp")
_rotate_append = function("rotate_append", "pinnppppp")
_advance = function("advance", "nippppppp")
_hash_append = function("hash_append", "pppinnppppn", "a step")


def cache(
    k: Tensor,
    v: Tensor,
    pos: Tensor,
    position: Tensor,
    blank: Sequence[Tensor] = (),
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Struct:
    """The columns of an arena in C: `Cache` of cache.h."""
    sizes = (c_int32 * len(blank))(*(column.itemsize for column in blank))
    columns = Struct(*blank), sizes
    return Struct(k.shape[1], len(blank), k, v, pos, k_scale, v_scale, *columns, position)


def hashing(rule: HashRule, code: Tensor, bits: int, pinned: int) -> Struct:
    """HashEvict for all layers in C: `Hashing` of cache.h. code: the column of codes."""
    keyed = rule.hash_with == "key"
    return Struct(code.itemsize, bits, keyed, rule.sinks, rule.recent, pinned, code)


def append(key: Tensor, value: Tensor, new: Slots) -> None:
    """See `plain.append`."""
    kind = KINDS.get(key.dtype, -1)
    dense = key.stride(1) == 1 == value.stride(1)
    if kind < 0 or not dense or (new.k_scale is None and new.k.dtype != key.dtype):
        plain_torch.append(key, value, new)
        return
    into, heads = _into(new), len(new.slot)
    _append(into, kind, heads, key, key.stride(0), value, value.stride(0), new.slot)


def rotate_append(qkv: Tensor, cos: Tensor, sin: Tensor, new: Slots) -> tuple[Tensor, Tensor]:
    """See `plain.rotate_append`."""
    heads, size = len(new.slot), qkv.shape[1]
    kind = KINDS.get(qkv.dtype, -1)
    dense = plain(qkv.dtype, qkv, cos, sin)
    if kind < 0 or not dense or (new.k_scale is None and new.k.dtype != qkv.dtype):
        return plain_torch.rotate_append(qkv, cos, sin, new)
    turned = torch.empty((len(qkv) - heads, size), dtype=qkv.dtype)
    _rotate_append(_into(new), kind, heads, len(qkv), qkv, cos, sin, new.slot, turned)
    return turned[:-heads].view(heads, -1, size), turned[-heads:]


def _into(new: Slots) -> Struct:
    return cache(new.k, new.v, new.pos, new.position, new.blank, new.k_scale, new.v_scale)


def advance(heads: Advancing, *, before: bool) -> None:
    """See `plain.advance`."""
    _advance(heads.length.numel(), before, *heads)


def hash_append(rule: HashRule, new: NewRow) -> bool:
    """Write each head's new row; in a full head, over the row whose code is least like the probes.
    Returns False, without any effect, if there are columns that C does not write. Raises
    MemoryError."""
    columns, key = new.columns, new.key
    if {*columns} != _COLUMNS or new.shown is not columns["pos"] or new.rotation is not None:
        return False
    probe = key[:, None] if rule.hash_with == "key" else new.query
    matrix = rule.matrix(new.layer, key)
    bits = matrix.shape[1]
    k, v, pos, code = (columns[name] for name in ("k", "v", "pos", "code"))
    dtype = key.dtype
    assert dtype in _KINDS, f"hash_append in C takes no {dtype}"
    assert code.itemsize in (2, 4, 8), f"hash_append in C takes no codes of {code.dtype}"
    assert bits <= _MAX_BITS, f"codes have at most {_MAX_BITS} bits"
    assert key.shape == new.value.shape, "keys and values have the same size"
    assert k.shape[1] == v.shape[1], "keys and values have the same size"
    assert plain(dtype, probe, key, new.value, k, v), _TAKES + "rows of one dtype"
    assert plain(torch.float32, matrix), _TAKES + "a float32 matrix"
    tables = new.length, new.cap, new.free_slot
    assert plain(torch.int64, *tables, new.start, new.position), _TAKES + "int64 layouts"
    assert plain(torch.int32, pos), _TAKES + "int32 positions"
    assert plain(code.dtype, code), _TAKES + "codes"
    into, how = cache(k, v, pos, new.position), hashing(rule, code, bits, new.pinned)
    given = Struct(matrix, *tables), _KINDS[dtype], *probe.shape[:2], probe, key, new.value
    _hash_append(into, how, *given, new.start, new.width)
    return True


append_evict = {"hashevict": hash_append}
