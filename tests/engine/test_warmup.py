"""At load everything is launched once that prompts and the steps of an answer will launch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import small
import torch

from minikv.cache.stats import Shape
from minikv.engine.warmup import _tiles, warm
from minikv.kernels import Rows, Segments
from minikv.kernels.attention import plain as ragged
from minikv.kernels.dispatch import Kernels
from minikv.kernels.mass import plain as mass
from minikv.models.llama import Llama
from minikv.policies.base import Evidence


def _first_leaves(
    logits: torch.Tensor, lse: torch.Tensor, rows: Rows, free_slot: torch.Tensor, *more: object
) -> None:
    """In place of a kernel that ends a step: the first row leaves a head over its cap."""
    free_slot.copy_(torch.where(rows.length > rows.cap, rows.start, -1))


class Recorder(Kernels):
    """Notes what is called, and what keywords it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, frozenset[str]]] = []

    def __getattribute__(self, name: str) -> object:
        found = super().__getattribute__(name)
        if name == "evict":
            return {policy: self._noting(policy, _first_leaves) for policy in ("h2o", "roco")}
        if name == "append_evict":
            return {"hashevict": self._noting("hashevict", lambda *given: False)}
        if name == "calls" or name.startswith("_") or not callable(found):
            return found
        return self._noting(name, found)

    def _noting(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            rows = [one._asdict() for one in args if isinstance(one, Segments)]
            given = [key for found in (kwargs, *rows) for key in found if found[key] is not None]
            self.calls.append((name, frozenset(given)))
            return function(*args, **kwargs)

        return call


def warmed(net: Llama, *policy: Any) -> list[str]:
    """The kernels that a warm-up calls. It leaves those in use and the chat's own cache as they
    were."""
    kv, recorder = small.scheduler(net, *policy), Recorder()
    kv.use(recorder)
    warm(kv, net)
    assert kv.notice is None
    assert kv.ops is recorder
    assert (kv.position, kv.arena.rows, kv.decode.nbytes) == (0, 0, 0)
    return [name for name, _ in recorder.calls]


def test_a_prompt_that_is_read_twice() -> None:
    """Its second reading is part of the warm-up. Of the rest tests/launches says whether it was
    warmed up."""
    names = warmed(small.network(), "kvzip", "h2o", 512)
    assert names.count("last_rows_attention") > 2
    assert {"ragged_attention", "h2o"} <= {*names}


def launch_tiles(shape: Shape, ops: Kernels, prompt: object, step: object = None) -> None:
    """What `_tiles` launches for a cache of this shape under these policies."""
    rules, cpu = SimpleNamespace(prompt=prompt, step=step), torch.device("cpu")
    kv = SimpleNamespace(shape=shape, device=cpu, dtype=torch.bfloat16, ops=ops, rules=rules)
    _tiles(kv)  # type: ignore[arg-type]


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
def test_every_tile_over_old_rows_is_among_them(group: int) -> None:
    """Whatever the number of tokens, few or many rows, listed or not, in every kind of layer."""
    tiles = pytest.importorskip("minikv.kernels.gpu")
    columns = pytest.importorskip("minikv.kernels.mass.gpu")
    ops: Any = Kernels()
    ops.ragged_prefill = Mock(side_effect=ragged.ragged_prefill)
    ops.each_attention = Mock(side_effect=mass.each_attention)
    shape = Shape(3, 2, 2 * group, 64, (None, 40, None), 1000)
    launch_tiles(shape, ops, SimpleNamespace(evidence=Evidence(each_query=True)))
    launched = [call.args for call in ops.ragged_prefill.call_args_list]
    seen = {(q.shape[2], rows.width == 1, window) for q, rows, _, _, window in launched}
    summed = [call.args[:2] for call in ops.each_attention.call_args_list]
    sums = {(queries.q.shape[2], len(parts[0]), queries.window) for queries, parts in summed}
    counts = range(1, 200)
    for dtype, size in itertools.product((torch.bfloat16, torch.float32), (64, 128, 256)):
        for window, (tile, called, kinds) in itertools.product(
            (None, 40),
            ((tiles.attention_tile, seen, (True, False)), (columns._span_tile, sums, (2, 3))),
        ):
            for kind in kinds:
                rows = [n for n, *how in called if how == [kind, window]]
                made = {tile(dtype, size, n * group) for n in rows}
                assert made == {tile(dtype, size, n * group) for n in counts}


@pytest.mark.parametrize("observe", [1, 16, 17, 32, 64])
def test_every_tile_of_the_observed_queries_is_among_them(observe: int) -> None:
    """A short prompt behind rows that lie in segments, or are listed, has fewer queries than the
    policy observes."""
    columns = pytest.importorskip("minikv.kernels.mass.gpu")
    ops: Any = Kernels()
    ops.add_attention_mass = Mock(side_effect=mass.add_attention_mass)
    step = SimpleNamespace(observe=observe, prompt_history=0)
    launch_tiles(Shape(2, 2, 4, 64, (None, 40), 1000), ops, None, step)
    given = [call.args for call in ops.add_attention_mass.call_args_list]
    seen = {(args[2].q.shape[2], len(args[3]), args[2].window) for args in given}
    for dtype, listed, window in itertools.product(
        (torch.bfloat16, torch.float32), (2, 3), (None, 40)
    ):
        made = {columns._tile(dtype, 64, n) for n, *how in seen if how == [listed, window]}
        assert made == {columns._tile(dtype, 64, n) for n in range(1, observe + 1)}


def test_a_context_that_is_too_short_for_prompts_is_left_alone() -> None:
    names = warmed(small.network(max_context=100), "snapkv", "none", 64)
    assert "gather_rows" not in names  # no prompt ended


@pytest.mark.parametrize(
    ("broken", "notice"),
    [
        (name, f"the Triton kernels are not used: RuntimeError: no C compiler of {name}")
        for name in ("ragged_attention", "add_attention_mass")
    ]
    + [("", None)],  # the weights are broken, which the first turn reports
)
def test_kernels_that_cannot_be_built_are_replaced_and_a_line_says_so(
    broken: str, notice: str | None
) -> None:
    net = small.network()
    kv = small.scheduler(net, "snapkv", "h2o")
    kv.ops = Kernels()
    kv.ops.name = "triton"
    if broken:
        error = RuntimeError(f"no C compiler of {broken}\nPlease specify via CC")
        setattr(kv.ops, broken, Mock(side_effect=error))
    else:
        net.layers[0].attention_norm.fill_(float("nan"))
    warm(kv, net)
    assert kv.ops.name == ("torch" if broken else "triton")
    assert kv.notice == notice
