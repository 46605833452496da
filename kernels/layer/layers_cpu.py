"""All layers of a decode step in one call of C: `layers.c`. Without it, the network calls each
layer's attention and `Rest` one after the other, with the same results.

Between two calls, threads fall asleep and Python runs on caches that the weights have emptied. In a
small model that took a third of a step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_double, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from minikv.kernels.layer.arena_cpu import Heads, StepArena
from minikv.kernels.layer.rest_cpu import Rest
from minikv.kernels.native.binding import loaded, plain

_AT_ONCE = 256 << 20
"""Bytes of weights that one call may read. An interrupt is heard between two calls."""


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
                ctypes.addressof(arena.each) + part.start * ctypes.sizeof(Heads),
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
