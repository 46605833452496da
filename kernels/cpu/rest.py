"""What follows attention in a layer of a decode step, in one call of C: `rest.c`. Without it, the
network calls one operation after the other (models/llama.py), with the same results."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_double, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from minikv.kernels.cpu import matrix as cpu
from minikv.kernels.cpu.binding import loaded, plain
from minikv.kernels.matrix import Matrix


@cache
def _library() -> ctypes.CDLL:
    """The library, the arguments of its functions declared."""
    found, p = loaded(), c_void_p
    found.minikv_rest.argtypes = [p, c_int64, p, p, p, p, c_double, p]
    found.minikv_rest_takes.argtypes = [p]
    found.minikv_rest.restype = found.minikv_rest_takes.restype = ctypes.c_int
    return found


def rest(
    out: Matrix,
    gate_up: Matrix,
    down: Matrix,
    following: Matrix | None,
    mlp_norm: Tensor,
    next_norm: Tensor,
    eps: float,
) -> Callable[[Tensor, Tensor], Tensor] | None:
    """A function of x [1, hidden], the input of the layer, and mixed [1, heads * D], the output of
    attention, both bfloat16. It changes x, in place, to the input of the next layer, and returns
    that layer's queries, keys and values before rotation [1, outs of `following`], or the normed
    row [1, hidden] if there is no next layer. It raises MemoryError.

    mlp_norm, next_norm: weights [hidden] of the norms before gate and up, and before `following`.
    None: C does not take such matrices.
    """
    given = [m for m in (out, gate_up, down, following) if m is not None]
    made = [cpu.addresses(m) for m in given]
    if not all(made) or not plain(torch.bfloat16, mlp_norm, next_norm):
        return None
    matrices = (cpu.Matrix * 4)(*(m for m in made if m is not None))
    library = _library()
    first = ctypes.addressof(matrices)
    if not library.minikv_rest_takes(first):
        return None
    hidden = out.outs
    assert gate_up.n == hidden == down.outs
    assert gate_up.outs == 2 * down.n
    columns = hidden if following is None else following.outs
    norms = mlp_norm.data_ptr(), next_norm.data_ptr()
    read = matrices, given, mlp_norm, next_norm

    def run(x: Tensor, mixed: Tensor) -> Tensor:
        assert read  # so that its memory is kept
        assert plain(torch.bfloat16, x, mixed)
        assert x.shape == (1, hidden)
        assert mixed.shape == (1, out.n)
        result = torch.empty((1, columns), dtype=x.dtype)
        failed = library.minikv_rest(
            first, hidden, mixed.data_ptr(), x.data_ptr(), *norms, eps, result.data_ptr()
        )
        if failed:
            raise MemoryError("a layer found no memory")
        return result

    return run
