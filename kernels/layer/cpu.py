"""A layer of a network in C: its small operators (`layer.c`), the part after attention in a decode
step (`rest.c`), and all layers of a step in one call (`layers.c`). For other dtypes and strides,
`plain.py` replaces the first; without the other two, the network calls one operation after another
(models/llama.py), with the same results.

Between two calls, threads fall asleep, and Python runs on caches that the weights have flushed. In
a small model that took a third of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.kernels.append.cpu import cache, hashing
from minikv.kernels.decode.plain import HashRule, Rows
from minikv.kernels.layer import plain as plain_torch
from minikv.kernels.native.binding import KINDS, Struct, function, loaded, plain
from minikv.kernels.product.cpu import struct
from minikv.kernels.product.matrix import Matrix

_AT_ONCE = 256 << 20
"""Bytes of weights that one call may read. Interrupts take effect only between two calls."""

_add_norm = function("add_norm", "innnpppdp")
_rotate = function("rotate", "innnnpppp")
_silu_mul = function("silu_mul", "innnp")
_layer_tail = function("rest", "pnppppdp", "a layer")
_layers = function("layers", "ppppnddppppp", "a step")


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """See `plain.add_norm`."""
    kind = KINDS.get(x.dtype, -1)
    dense = x.stride(1) == 1 and (y is None or (y.is_contiguous() and y.dtype == x.dtype))
    if kind < 0 or not dense or weight.dtype != x.dtype:
        return plain_torch.add_norm(x, y, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _add_norm(kind, *x.shape, x.stride(0), x, y, weight, eps, out)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `plain.rotate`."""
    kind = KINDS.get(x.dtype, -1)
    dense = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    dense = dense and cos.is_contiguous() and sin.is_contiguous()
    if kind < 0 or not dense or not cos.dtype == sin.dtype == x.dtype:
        return plain_torch.rotate(x, cos, sin)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rotate(kind, *x.shape, x.stride(0), x, cos, sin, out)
    return out


def silu_mul(both: Tensor) -> Tensor:
    """See `plain.silu_mul`."""
    kind, size = KINDS.get(both.dtype, -1), both.shape[1] // 2
    if kind < 0 or both.stride(1) != 1:
        return plain_torch.silu_mul(both)
    _silu_mul(kind, both.shape[0], size, both.stride(0), both)
    return both[:, :size]


@dataclass(frozen=True, slots=True)
class LayerTail:
    """The part of a layer after attention. A call takes x [1, hidden], the input of the layer, and
    mixed [1, heads * D], the output of attention, both bfloat16. It changes x in place to the input
    of the next layer, and returns that layer's queries, keys and values before rotation [1, outs],
    or the normed row [1, hidden] if there is no next layer. Raises MemoryError.

    given: the matrices of out, gate and up, down, and the next layer's queries, keys and values, if
    there is one; matrices: the same for C.
    """

    given: Sequence[Matrix]
    matrices: Struct
    norms: tuple[Tensor, Tensor]
    eps: float

    @property
    def sizes(self) -> tuple[int, int, int, float]:
        """The sizes that all layers of a network share: hidden, heads * D, the size between gate
        and down; and the epsilon of the norms."""
        return self.given[0].outs, self.given[0].n, self.given[2].n, self.eps

    @property
    def outs(self) -> int:
        """Numbers of the result."""
        return self.given[-1].outs

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(matrix.weights.nbytes for matrix in self.given)

    def __call__(self, x: Tensor, mixed: Tensor) -> Tensor:
        """See the class."""
        hidden = self.given[0].outs
        assert plain(torch.bfloat16, x, mixed)
        assert x.shape == (1, hidden)
        assert mixed.shape == (1, self.given[0].n)
        result = torch.empty((1, self.outs), dtype=x.dtype)
        _layer_tail(self.matrices, hidden, mixed, x, *self.norms, self.eps, result)
        return result


def layer_tail(
    out: Matrix,
    gate_up: Matrix,
    down: Matrix,
    following: Matrix | None,
    mlp_norm: Tensor,
    next_norm: Tensor,
    eps: float,
) -> LayerTail | None:
    """`LayerTail` of these matrices; None if C does not support them.

    mlp_norm, next_norm: weights [hidden] of the norms before gate and up, and before `following`.
    """
    matrices = struct(out, gate_up, down, following)
    if matrices is None or not plain(torch.bfloat16, mlp_norm, next_norm):
        return None
    if not loaded().minikv_rest_takes(matrices):
        return None
    assert gate_up.n == out.outs == down.outs
    assert gate_up.outs == 2 * down.n
    given = [matrix for matrix in (out, gate_up, down, following) if matrix is not None]
    return LayerTail(given, matrices, (mlp_norm, next_norm), eps)


@dataclass(frozen=True)
class StepArena:
    """The arena of a decode step in the form for `layers.c`. Its tensors must not move.

    shape: layers, heads, head size, queries per KV head (0 if there is no lse), and the pitch of
    logits. cache, hashing and heads: `Cache` and `Hashing` of cache.h, and for each layer `Heads`.
    """

    shape: tuple[int, int, int, int, int]
    tiles: bool
    cache: Struct
    hashing: Struct | None
    heads: Struct


_HEADS, _WEIGHTS = 10, 6
"""Fields of `Heads` and of `Weights` of layers.c."""


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
    """The arena of a decode step in the form for `layers`; None if C does not support it.

    columns: k, v, pos and perhaps k_scale and v_scale; these, blank and position: as in `Slots`.
    start, length and slot int64 [L, H]: each head's rows and its new row. oldest int64 [L], used in
    layers with a window; logits [L, H, G, N] and lse [L, H, G]: as in `ragged_attention`, for all
    layers. rule and rows: for a policy that chooses victims by the query, of which C supports
    HashEvict. The victims are written to free_slot int64 [L, H]. tiles: as in `decode.Decode`.
    """
    k, v, pos = columns["k"], columns["v"], columns["pos"]
    scales = columns.get("k_scale"), columns.get("v_scale")
    kind = torch.bfloat16 if scales[0] is None else torch.int8
    fits = (
        plain(kind, k, v)
        and plain(torch.int32, pos)
        and plain(torch.int64, position, start, length, slot, oldest)
        and plain(torch.float32, *(t for t in (*scales, logits, lse) if t is not None))
        and all(column.is_contiguous() and column.dim() == 1 for column in blank)
    )
    if rule is not None and fits:
        assert rows is not None
        fits = {*columns} == {"k", "v", "pos", "code"} and rows.pos is pos
        fits = fits and kind == k.dtype == torch.bfloat16
    if not fits:
        return None
    fields: list[object] = []
    for layer, window in enumerate(windows):
        fields += [t[layer] for t in (start, length, slot)]
        fields.append(None if window is None else oldest[layer])
        fields += [None if t is None else t[layer] for t in (logits, lse)]
        if rule is None or rows is None:
            fields += [None] * 4
        else:
            matrix = rule.matrix(layer, k[:1])
            fields += [matrix, rows.length[layer], rows.cap[layer], free_slot[layer]]
    hashes = None
    if rule is not None and rows is not None:
        bits = rule.matrix(0, k[:1]).shape[1]
        hashes = hashing(rule, columns["code"], bits, rows.pinned)
    group, pitch = 0 if lse is None else lse.shape[2], 0 if logits is None else logits.shape[3]
    shape = (*start.shape, k.shape[1], group, pitch)
    into = cache(k, v, pos, position, blank, *scales)
    return StepArena(shape, tiles, into, hashes, Struct(*fields))


Layers = Callable[[Tensor, Tensor, Tensor, Tensor, float, StepArena], Tensor]
"""Takes x [1, hidden] and qkv [1, (heads + 2 * kv_heads) * D], the input of the first layer and its
queries, keys and values, cos and sin, rows of D, the factor on queries, and the arena. Returns x
after the final norm [1, hidden]; x itself is overwritten. Raises MemoryError, perhaps after some
layers."""


def layers(
    tails: Sequence[object],
    norms: Sequence[tuple[Tensor | None, Tensor | None]],
    angles: Sequence[int],
) -> Layers | None:
    """All layers of a decode step, from the `LayerTail` of each; None if these are not C's, or if
    their sizes differ. norms: by layer, the norms of each head's query and key before rotation, [D]
    each; angles: the row of cos and sin for each layer."""
    each = [tail for tail in tails if isinstance(tail, LayerTail)]
    sizes = {tail.sizes for tail in each}
    if len(each) < len(tails) or len(sizes) != 1 or any(len(r.given) < 4 for r in each[:-1]):
        return None
    hidden, mixed, _, eps = sizes.pop()
    parts = zip(each, norms, angles, strict=True)
    weights = Struct(*(field for r, two, at in parts for field in (r.matrices, *r.norms, *two, at)))
    spans = [*_spans([tail.nbytes for tail in each])]

    def compute(
        x: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, scale: float, arena: StepArena
    ) -> Tensor:
        count, heads, size, queries, pitch = arena.shape
        group = mixed // (heads * size)
        assert plain(torch.bfloat16, x, qkv, cos, sin)
        assert x.shape == (1, hidden)
        assert qkv.numel() == mixed + 2 * heads * size
        assert count == len(each)
        assert queries in (0, group)
        assert cos.numel() == (max(angles) + 1) * size == sin.numel()
        assert all(norm is None or norm.numel() == size for two in norms for norm in two)
        told = Struct(heads, group, pitch, hidden, arena.tiles, arena.hashing)
        for part in spans:
            result = torch.empty((1, each[part.stop - 1].outs), dtype=x.dtype)
            rows = c_void_p(arena.heads.at(part.start * _HEADS))
            own = c_void_p(weights.at(part.start * _WEIGHTS))
            given = cos, sin, x, qkv, result
            _layers(arena.cache, told, rows, own, len(part), eps, scale, *given)
            qkv = result
        return qkv

    return compute


def _spans(sizes: Sequence[int]) -> Iterator[range]:
    """Divide layers with these sizes of weights in bytes into calls: as many layers per call as
    `_AT_ONCE` allows, at least one."""
    first, total = 0, 0
    for i, size in enumerate(sizes):
        if i > first and total + size > _AT_ONCE:
            yield range(first, i)
            first, total = i, 0
        total += size
    yield range(first, len(sizes))
