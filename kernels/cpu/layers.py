"""All layers of a decode step in one call of C: `layers.c`. Without it, the network calls each
layer's attention and `Rest` one after the other, with the same results.

Between two calls, threads fall asleep and Python runs on caches that the weights have emptied. In a
small model that took a third of a step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import c_double, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from minikv import kernels
from minikv.kernels.cpu.binding import address, loaded, plain
from minikv.kernels.cpu.rest import Rest

_AT_ONCE = 256 << 20
"""Bytes of weights that one call may read. An interrupt is heard between two calls."""


class _Cache(ctypes.Structure):
    """`Cache` of cache.h."""

    _fields_ = (
        ("D", c_int64),
        ("blanks", c_int64),
        *((name, c_void_p) for name in ("k", "v", "pos", "k_scale", "v_scale")),
        *((name, c_void_p) for name in ("blank", "sizes", "position")),
    )


class _Hashing(ctypes.Structure):
    """`Hashing` of cache.h."""

    _fields_ = (
        *((name, c_int64) for name in ("code_size", "bits", "keyed", "sinks", "recent", "pinned")),
        ("code", c_void_p),
    )


class _HashLayer(ctypes.Structure):
    """`HashLayer` of cache.h."""

    _fields_ = tuple(
        (name, c_void_p)
        for name in (
            *("matrix", "length", "cap", "free_slot"),
            *("undo_k", "undo_v", "undo_pos", "undo_code"),
        )
    )


class _Heads(ctypes.Structure):
    """`Heads` of layers.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("start", "length", "slot", "oldest", "logits", "lse")),
        ("hash", _HashLayer),
    )


class _Weights(ctypes.Structure):
    """`Weights` of layers.c."""

    _fields_ = tuple((name, c_void_p) for name in ("matrices", "mlp_norm", "next_norm"))


class _Sizes(ctypes.Structure):
    """`Sizes` of layers.c."""

    _fields_ = (
        *((name, c_int64) for name in ("H", "G", "pitch", "hidden", "tiles")),
        ("hashing", c_void_p),
    )


@cache
def _library() -> ctypes.CDLL:
    """The library, the arguments of its function declared."""
    found, p = loaded(), c_void_p
    found.minikv_layers.argtypes = [p, p, p, p, c_int64, c_double, p, p, p, p, p]
    found.minikv_layers.restype = ctypes.c_int
    return found


@dataclass(frozen=True)
class StepArena:
    """The arena of a decode step in the form that C takes. It keeps the tensors alive, which must
    stay where they are.

    group: queries per KV head, 0 if there is no lse; pitch and tiles: as in `Sizes` of layers.c.
    """

    layers: int
    heads: int
    head_dim: int
    group: int
    pitch: int
    tiles: bool
    cache: _Cache
    hashing: _Hashing | None
    each: ctypes.Array[_Heads]
    kept: tuple[object, ...]


def step_arena(
    columns: Mapping[str, Tensor],
    blank: Sequence[Tensor],
    position: Tensor,
    start: Tensor,
    length: Tensor,
    slot: Tensor,
    windows: Sequence[int | None],
    oldest: Tensor,
    logits: Tensor | None,
    lse: Tensor | None,
    hashing: kernels.Hashing | None = None,
    *,
    tiles: bool = False,
) -> StepArena | None:
    """The arena of a decode step in the form that `layers` takes; None if C does not take it.

    columns: k, v, pos and perhaps k_scale and v_scale; these, blank and position: as in
    `rotate_append`. start, length and slot int64 [L, H]: each head's rows and its new row. oldest
    int64 [L], which counts for layers with a window; logits [L, H, G, N] and lse [L, H, G]: as in
    `ragged_attention`, which gets those of one layer. hashing: for HashEvict. tiles: as in
    `decode.Decode`.
    """
    k, v, pos = columns["k"], columns["v"], columns["pos"]
    k_scale, v_scale = columns.get("k_scale"), columns.get("v_scale")
    kind = torch.bfloat16 if k_scale is None else torch.int8
    exact = [t for t in (k_scale, v_scale, logits, lse) if t is not None]
    fits = (
        plain(kind, k, v)
        and plain(torch.int32, pos)
        and plain(torch.int64, position, start, length, slot, oldest)
        and plain(torch.float32, *exact)
        and all(column.is_contiguous() and column.dim() == 1 for column in blank)
        and (hashing is None or _takes(hashing, kind))
    )
    if not fits:
        return None
    addresses = (c_void_p * len(blank))(*(column.data_ptr() for column in blank))
    sizes = (ctypes.c_int32 * len(blank))(*(column.itemsize for column in blank))
    layers, heads = start.shape
    each = (_Heads * layers)(
        *(
            _Heads(
                *(t[layer].data_ptr() for t in (start, length, slot)),
                None if window is None else oldest[layer].data_ptr(),
                *(None if t is None else t[layer].data_ptr() for t in (logits, lse)),
                _HashLayer() if hashing is None else _hash_layer(hashing, layer),
            )
            for layer, window in enumerate(windows)
        )
    )
    return StepArena(
        layers,
        heads,
        k.shape[1],
        0 if lse is None else lse.shape[2],
        0 if logits is None else logits.shape[3],
        tiles,
        _Cache(
            k.shape[1],
            len(blank),
            *map(address, (k, v, pos, k_scale, v_scale)),
            ctypes.addressof(addresses),
            ctypes.addressof(sizes),
            position.data_ptr(),
        ),
        None if hashing is None else _hashing(hashing),
        each,
        (
            dict(columns),
            blank,
            hashing,
            position,
            start,
            length,
            slot,
            oldest,
            logits,
            lse,
            addresses,
            sizes,
        ),
    )


def _takes(hashing: kernels.Hashing, kind: torch.dtype) -> bool:
    """Whether C can compute HashEvict over rows of this dtype."""
    k, v, pos, code = hashing.undo_rows
    return (
        plain(torch.bfloat16, k, v)
        and kind == torch.bfloat16
        and plain(torch.int32, pos)
        and plain(hashing.code.dtype, hashing.code, code)
        and plain(torch.float32, *hashing.matrices)
        and plain(torch.int64, hashing.length, hashing.cap, hashing.free_slot)
    )


def _hashing(given: kernels.Hashing) -> _Hashing:
    bits = given.matrices[0].shape[1]
    rows = given.sinks, given.recent, given.pinned
    return _Hashing(given.code.itemsize, bits, given.keyed, *rows, given.code.data_ptr())


def _hash_layer(given: kernels.Hashing, layer: int) -> _HashLayer:
    tables = (t[layer].data_ptr() for t in (given.length, given.cap, given.free_slot))
    head = layer * given.length.shape[1]
    undo = (rows[head:].data_ptr() for rows in given.undo_rows)
    return _HashLayer(given.matrices[layer].data_ptr(), *tables, *undo)


Layers = Callable[[Tensor, Tensor, Tensor, Tensor, StepArena], Tensor]
"""Takes x [1, hidden] and qkv [1, (heads + 2 * kv_heads) * D], the input of the first layer and its
queries, keys and values, cos and sin [1, 1, D], and the arena. Returns x after the final norm [1,
hidden]; x itself is overwritten. Raises MemoryError, perhaps after some layers."""


def layers(rests: Sequence[object]) -> Layers | None:
    """All layers of a decode step, from the `Rest` of each; None: they are not of C, or their sizes
    differ."""
    each = [rest for rest in rests if isinstance(rest, Rest)]
    sizes = {(rest.hidden, rest.mixed, rest.mlp, rest.eps) for rest in each}
    if len(each) < len(rests) or len(sizes) != 1 or any(not rest.outs for rest in each[:-1]):
        return None
    hidden, mixed, _, eps = sizes.pop()
    weights = (_Weights * len(each))(
        *(
            _Weights(ctypes.addressof(rest.matrices), *(norm.data_ptr() for norm in rest.norms))
            for rest in each
        )
    )
    spans = [*_spans([rest.nbytes for rest in each])]
    run = _library().minikv_layers

    def compute(x: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, arena: StepArena) -> Tensor:
        assert plain(torch.bfloat16, x, qkv, cos, sin)
        heads, size = arena.heads, arena.head_dim
        group = mixed // (heads * size)
        assert x.shape == (1, hidden)
        assert qkv.numel() == mixed + 2 * heads * size
        assert arena.layers == len(each)
        assert arena.group in (0, group)
        assert cos.numel() == size == sin.numel()
        hashing = None if arena.hashing is None else ctypes.addressof(arena.hashing)
        told = _Sizes(heads, group, arena.pitch, hidden, arena.tiles, hashing)
        for part in spans:
            last = each[part.stop - 1]
            result = torch.empty((1, last.outs or hidden), dtype=x.dtype)
            failed = run(
                ctypes.addressof(arena.cache),
                ctypes.addressof(told),
                ctypes.addressof(arena.each) + part.start * ctypes.sizeof(_Heads),
                ctypes.addressof(weights) + part.start * ctypes.sizeof(_Weights),
                len(part),
                eps,
                cos.data_ptr(),
                sin.data_ptr(),
                x.data_ptr(),
                qkv.data_ptr(),
                result.data_ptr(),
            )
            if failed:
                raise MemoryError("a step found no memory")
            qkv = result
        return qkv

    return compute


def _spans(sizes: Sequence[int]) -> Iterator[range]:
    """Layers with so many bytes of weights, divided into calls: as many layers as `_AT_ONCE`
    allows, at least one."""
    first, total = 0, 0
    for i, size in enumerate(sizes):
        if i > first and total + size > _AT_ONCE:
            yield range(first, i)
            first, total = i, 0
        total += size
    yield range(first, len(sizes))
