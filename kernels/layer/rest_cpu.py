"""What follows attention in a layer of a decode step, in one call of C: `rest.c`. Without it, the
network calls one operation after the other (models/llama.py), with the same results."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from minikv.kernels.native.binding import loaded, plain
from minikv.kernels.product import matrix_cpu as cpu
from minikv.kernels.product.matrix import Matrix


@cache
def _library() -> ctypes.CDLL:
    """The library, the arguments of its functions declared."""
    found, p = loaded(), c_void_p
    found.minikv_rest.argtypes = [p, c_int64, p, p, p, p, c_double, p]
    found.minikv_rest_takes.argtypes = [p]
    found.minikv_rest.restype = found.minikv_rest_takes.restype = ctypes.c_int
    return found


class Rest:
    """What follows attention in a layer. Called with x [1, hidden], the input of the layer, and
    mixed [1, heads * D], the output of attention, both bfloat16, it changes x, in place, to the
    input of the next layer, and returns that layer's queries, keys and values before rotation [1,
    outs], or the normed row [1, hidden] if there is no next layer. It raises MemoryError."""

    def __init__(
        self,
        given: list[Matrix],
        matrices: ctypes.Array[cpu.Matrix],
        norms: tuple[Tensor, Tensor],
        eps: float,
    ) -> None:
        """given and matrices: of out, gate and up, down, and the next layer's queries, keys and
        values, if there is one."""
        self.matrices, self.norms, self.eps = matrices, norms, eps
        self.hidden, self.mixed, self.mlp = given[0].outs, given[0].n, given[2].n
        self.outs = given[3].outs if len(given) > 3 else 0
        self.nbytes = sum(m.weights.nbytes for m in given)
        self._read = given  # so that its memory is kept
        self._run = _library().minikv_rest
        self._weights = norms[0].data_ptr(), norms[1].data_ptr(), eps

    def __call__(self, x: Tensor, mixed: Tensor) -> Tensor:
        """See the class."""
        assert plain(torch.bfloat16, x, mixed)
        assert x.shape == (1, self.hidden)
        assert mixed.shape == (1, self.mixed)
        result = torch.empty((1, self.outs or self.hidden), dtype=x.dtype)
        failed = self._run(
            self.matrices,
            self.hidden,
            mixed.data_ptr(),
            x.data_ptr(),
            *self._weights,
            result.data_ptr(),
        )
        if failed:
            raise MemoryError("a layer found no memory")
        return result


def rest(
    out: Matrix,
    gate_up: Matrix,
    down: Matrix,
    following: Matrix | None,
    mlp_norm: Tensor,
    next_norm: Tensor,
    eps: float,
) -> Rest | None:
    """`Rest` of these matrices; None: C does not take them.

    mlp_norm, next_norm: weights [hidden] of the norms before gate and up, and before `following`.
    """
    given = [m for m in (out, gate_up, down, following) if m is not None]
    made = [cpu.addresses(m) for m in given]
    if not all(made) or not plain(torch.bfloat16, mlp_norm, next_norm):
        return None
    matrices = (cpu.Matrix * 4)(*(m for m in made if m is not None))
    if not _library().minikv_rest_takes(matrices):
        return None
    assert gate_up.n == out.outs == down.outs
    assert gate_up.outs == 2 * down.n
    return Rest(given, matrices, (mlp_norm, next_norm), eps)
