"""The rest of a layer in one call: bit for bit what its operations make one after the other."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import half_network
import pytest
import torch
from drawing import randoms
from pairwise import pairwise, some_by_day
from torch import Tensor

from minikv.cache.kv_cache import KVCache
from minikv.cache.rules import Rules
from minikv.cache.stats import Shape
from minikv.kernels.layer import cpu as rest
from minikv.kernels.native import build
from minikv.kernels.product.matrix import Matrix
from minikv.models.linear import half_tile
from minikv.models.llama import Llama

pytestmark = pytest.mark.skipif(build.find() is None, reason="no C compiler on this system")

FORMS = ["auto", "int8", "int4"]
SIZES = [(3, 96, 4, 2, 24, 160), (2, 64, 2, 1, 32, 192), (1, 768, 12, 4, 64, 2048)]
"""Layers, hidden, heads, KV heads, head size, MLP: a part of a block, of a tile, and threads."""


def network(sizes: tuple[int, ...], form: str, biased: bool = False) -> Llama:
    net = half_network.made(*sizes, biased=biased)
    for name, tensor in net.tensors():
        if name.endswith(("norm.weight", "bias")):
            tensor.copy_(randoms(len(name), *tensor.shape, dtype=torch.bfloat16))
    return half_network.packed(net, form)


def cache_of(net: Llama) -> KVCache:
    c = net.config
    shape = Shape(c.layers, c.kv_heads, c.heads, c.head_dim, c.windows, c.max_context)
    return KVCache(shape, Rules(), dtype=net.dtype, device=net.device)


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


CASES = SIZES, FORMS, (False, True), (1, 2)


@pytest.mark.parametrize(
    ("sizes", "form", "biased", "threads"),
    some_by_day(product(*CASES), {*pairwise(*CASES)}.__contains__),
    indirect=["threads"],
    ids=str,
)
def test_a_step_is_that_of_separate_calls(
    sizes: tuple[int, ...], form: str, biased: bool, threads: int
) -> None:
    net = network(sizes, form, biased)
    called = 0

    def counted(run: Callable[[Tensor, Tensor], Tensor] | None) -> Any:
        def counting(x: Tensor, mixed: Tensor) -> Tensor:
            nonlocal called
            called += 1
            assert run is not None
            return run(x, mixed)

        return run and counting

    found = []
    for together in (True, False):
        kv = cache_of(net)
        ops: Any = kv.ops
        make = ops.rest
        ops.rest = (lambda *given, make=make: counted(make(*given))) if together else None
        net.use(ops)
        called = 0
        found.append([net.forward(torch.tensor([3 + i]), kv) for i in range(3)])
        taken = form != "int4" or four_bits(half_tile() or 0, sizes[-1])
        assert called == (3 * net.config.layers if together and taken else 0)
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)
        assert bool(one.isfinite().all())


def four_bits(half: int, mlp: int = 64) -> bool:
    """Whether C takes matrices of four bits in the layout of `half`."""

    def matrix(rows: int, n: int) -> Matrix:
        padded = -(-rows // 64) * 64
        weights = torch.zeros(padded, n // 2, dtype=torch.uint8)
        scales = torch.zeros(n // 32, padded, 2, dtype=torch.bfloat16)
        return Matrix(rows, n, weights, scales, None, half)

    norm = torch.ones(64, dtype=torch.bfloat16)
    matrices = matrix(64, 64), matrix(2 * mlp, 64), matrix(64, mlp)
    return rest.rest(*matrices, None, norm, norm, 1e-5) is not None


def test_what_it_does_not_take() -> None:
    """float32, rows that lie apart, an MLP that is not whole blocks, and an unknown layout."""
    assert not four_bits(16) or not four_bits(32)
    norm = torch.ones(32, dtype=torch.bfloat16)
    square, gate_up, down = (
        Matrix(rows, n, torch.zeros(rows, n, dtype=torch.bfloat16))
        for rows, n in ((32, 32), (128, 32), (32, 64))
    )
    assert rest.rest(square, gate_up, down, None, norm, norm, 1e-5) is not None
    wide = Matrix(32, 32, torch.zeros(32, 32))
    apart = Matrix(32, 32, torch.zeros(32, 64, dtype=torch.bfloat16)[:, :32])
    for bad in (wide, apart):
        assert rest.rest(bad, gate_up, down, None, norm, norm, 1e-5) is None
        assert rest.rest(square, gate_up, down, bad, norm, norm, 1e-5) is None
    assert rest.rest(square, gate_up, down, None, norm.float(), norm, 1e-5) is None
    biased = Matrix(32, 32, square.weights, None, torch.zeros(32))
    assert rest.rest(biased, gate_up, down, None, norm, norm, 1e-5) is None
    odd = (Matrix(rows, n, torch.zeros(rows, n).bfloat16()) for rows, n in ((80, 32), (32, 40)))
    assert rest.rest(square, *odd, None, norm, norm, 1e-5) is None


def test_what_is_read_is_kept() -> None:
    """C has addresses; the function keeps every tensor that they are of."""
    parts = [torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((32, 32), (128, 32), (32, 64))]
    norms = [torch.ones(32, dtype=torch.bfloat16) for _ in range(2)]
    made = rest.rest(*(Matrix(*part.shape, part) for part in parts), None, *norms, 1e-5)
    alive = [weakref.ref(tensor) for tensor in (*parts, *norms)]
    del parts, norms
    gc.collect()
    assert all(tensor() is not None for tensor in alive)
    del made
    gc.collect()
    assert all(tensor() is None for tensor in alive)


def test_a_network_in_float32_calls_one_operation_after_the_other() -> None:
    net = network(SIZES[0], "auto")
    plain = Llama(net.config).randomise(1)
    kv = cache_of(plain)
    plain.use(kv.ops)
    assert plain._tails == []
    assert bool(plain.forward(torch.tensor([3]), kv).isfinite().all())


def test_what_is_not_a_number_stays_so() -> None:
    net = network(SIZES[0], "int8")
    kv = cache_of(net)
    net.use(kv.ops)
    net.layers[1].mlp_norm[5] = torch.nan
    assert not bool(net.forward(torch.tensor([3]), kv).isfinite().any())
