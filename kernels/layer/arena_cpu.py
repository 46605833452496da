"""The arena of a decode step in the form that `layers.c` takes: addresses, found once when steps
begin."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.kernels.decode.plain import HashRule, Rows
from minikv.kernels.native.binding import address, plain


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

    _fields_ = tuple((name, c_void_p) for name in ("matrix", "length", "cap", "free_slot"))


class Heads(ctypes.Structure):
    """`Heads` of layers.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("start", "length", "slot", "oldest", "logits", "lse")),
        ("hash", _HashLayer),
    )


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
    each: ctypes.Array[Heads]
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
    rule: HashRule | None,
    rows: Rows | None,
    free_slot: Tensor,
    *,
    tiles: bool = False,
) -> StepArena | None:
    """The arena of a decode step in the form that `layers` takes; None if C does not take it.

    columns: k, v, pos and perhaps k_scale and v_scale; these, blank and position: as in
    `rotate_append`. start, length and slot int64 [L, H]: each head's rows and its new row. oldest
    int64 [L], which counts for layers with a window; logits [L, H, G, N] and lse [L, H, G]: as in
    `ragged_attention`, which gets those of one layer. rule and rows: of a policy that chooses
    victims by the query, of which C has HashEvict. free_slot int64 [L, H] gets these. tiles: as in
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
    )
    matrices: list[Tensor] = []
    if rule is not None and fits:
        assert rows is not None
        fits = {*columns} == {"k", "v", "pos", "code"} and rows.pos is pos and kind == k.dtype
        fits = fits and kind == torch.bfloat16
        matrices = [rule.matrix(layer, k[:1]) for layer in range(len(start))] if fits else []
    if not fits:
        return None
    addresses = (c_void_p * len(blank))(*(column.data_ptr() for column in blank))
    sizes = (ctypes.c_int32 * len(blank))(*(column.itemsize for column in blank))
    layers, heads = start.shape
    each = (Heads * layers)(
        *(
            Heads(
                *(t[layer].data_ptr() for t in (start, length, slot)),
                None if window is None else oldest[layer].data_ptr(),
                *(None if t is None else t[layer].data_ptr() for t in (logits, lse)),
                _HashLayer()
                if rows is None
                else _HashLayer(
                    *(
                        t.data_ptr()
                        for t in (
                            matrices[layer],
                            rows.length[layer],
                            rows.cap[layer],
                            free_slot[layer],
                        )
                    )
                ),
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
        None if rule is None or rows is None else _hashing(rule, rows, columns, matrices[0]),
        each,
        (
            dict(columns),
            blank,
            matrices,
            rows,
            free_slot,
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


def _hashing(rule: HashRule, rows: Rows, columns: Mapping[str, Tensor], matrix: Tensor) -> _Hashing:
    code, keyed = columns["code"], rule.hash_with == "key"
    numbers = code.itemsize, matrix.shape[1], keyed, rule.sinks, rule.recent, rows.pinned
    return _Hashing(*numbers, code.data_ptr())
