"""All layers of a decode step in Triton: five launches a layer give bit for bit what six give; and
what is not taken.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import small
import torch
from triton_device import INTERPRETED, kernel

from minikv.engine.engine import Engine
from minikv.kernels.dispatch import Kernels
from minikv.models.linear import Matrix
from minikv.models.llama import Llama

pytest.importorskip("triton", reason="no Triton on this system")
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter")


@pytest.mark.parametrize("step", [pytest.param("none", marks=pytest.mark.soak), "roco"])
def test_steps_are_those_of_one_kernel_after_the_other(step: str) -> None:
    """Uneven heads, layers with and without a window, with statistics of rows and without."""
    from minikv.kernels.triton.table import Triton

    config = small.network(layers=2, heads=4, kv_heads=2, head_dim=16, windows=(None, 12)).config
    net = Llama(config, dtype=torch.float16).randomise(0, 0.2)
    written = []

    class Six(Kernels):
        products = True
        rest = staticmethod(Triton.rest)
        normed_product = staticmethod(Triton.normed_product)
        ragged_attention = staticmethod(Triton.ragged_attention)

        @staticmethod
        def rotate_append(*given: Any) -> Any:
            written.append("rotate_append")
            return Triton.rotate_append(*given)

    class Five(Six):
        layers = staticmethod(Triton.layers)
        step_arena = staticmethod(Triton.step_arena)

    found = []
    for ops, launched in ((Six(), 4), (Five(), 0)):
        net.use(Kernels())
        engine = Engine(net, small.scheduler(net, "h2o+ada", step, 20))
        engine.prompt(small.ids(30))
        engine.kv.decode.window[1] = 6  # so that the layer holds rows which a query does not see
        engine.kv.decode.ops = ops
        net.use(ops)
        written.clear()
        logits = torch.stack([engine.step(token) for token in small.ids(2, 7)])
        assert len(written) == launched
        arena = engine.kv.arena
        assert (net._layers is None) == (launched == 4)
        found.append([logits, arena.length, arena.free_slot, *arena.columns.values()])
    assert bool(torch.isfinite(found[0][0]).all())
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)


def test_what_a_step_is_not_given_an_arena_for() -> None:
    """Rows in int8, and what HashEvict does with the query."""
    make = kernel("triton.step_arena").step_arena
    k, table = torch.zeros(4, 16), torch.zeros((1, 2), dtype=torch.int64)
    columns = {"k": k, "v": k, "pos": torch.zeros(4, dtype=torch.int32)}
    given = ((), table[0, 0], table, table, table, (None,), table[:, 0], None, None, table[0])
    assert make(columns, *given) is not None
    assert make(columns | {"k_scale": torch.zeros(4)}, *given) is None
    assert make(columns, *given, object()) is None


def test_layers_without_all_products_are_not_taken() -> None:
    layers, rest = kernel("triton.layers").layers, kernel("triton.rest")
    square, wide = (Matrix(n, 32, torch.zeros(n, 32, dtype=torch.bfloat16)) for n in (32, 64))
    norm = torch.ones(32, dtype=torch.bfloat16)
    inner, last = (
        rest.rest(square, wide, square, following, norm, norm, 1e-5) for following in (wide, None)
    )
    first, other = rest.normed_product(wide, norm, 1e-5), object()
    assert layers([inner, last], first) is not None
    assert layers([last], first) is not None
    for rests, product in (
        ([inner, last], None),
        ([inner, last], other),
        ([other, last], first),
        ([inner, other], first),
        ([last, last], first),
    ):
        assert layers(rests, product) is None
