"""All layers of a step in one call: bit for bit what the calls of each layer make one after the
other, with every step policy, in the network's numbers and in the cache."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, product
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from pairwise import pairwise, some_by_day
from small import FAMILIES, SOON, config, ids, over
from tensors import randoms, torch_threads
from torch import Tensor

from minikv import policies
from minikv.cache.budget import Budget
from minikv.cache.decode_step import DecodeStep
from minikv.cache.kv_cache import KVCache
from minikv.cache.rules import Rules
from minikv.engine.engine import Engine
from minikv.kernels import dispatch
from minikv.kernels.attention import cpu as prefill
from minikv.kernels.layer import cpu as layers
from minikv.kernels.native import build, choice
from minikv.kernels.product.matrix import Matrix
from minikv.models.linear import Plain, kept
from minikv.models.llama import Llama
from minikv.models.tensors import randomise, tensors_of
from minikv.policies.hashevict import HashEvict

pytestmark = pytest.mark.skipif(build.find() is None, reason="no C compiler on this system")
STEPS = [*policies.step_names()]
TOKENS = 8
"""Of an answer: every step policy evicts within these."""
SOME = ("qwen3", "smollm3", "ministral3")
SHAPES = {"3 queries": (6, 2, 32), "one": (2, 2, 24), "5": (10, 2, 16)}
"""Heads, KV heads and head size."""


def network(
    shape: str = "3 queries",
    form: str = "auto",
    window: Any = None,
    count: int = 3,
    family: str = "",
) -> Llama:
    """In bfloat16, with its matrices as they are ("auto") or packed; the first layer has no
    window."""
    heads, kv_heads, head_dim = SHAPES[shape]
    biases = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), shape == "one")
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "hidden": 128, "mlp": 640}
    how = config((None, *(window,) * (count - 1)), **sizes, **biases, **FAMILIES.get(family, {}))
    made = randomise(Llama(how, dtype=torch.bfloat16), 1, 0.2)
    for name, tensor in tensors_of(made):
        if name.endswith(("norm.weight", "bias")):
            tensor.copy_(randoms(len(name), *tensor.shape, dtype=torch.bfloat16))
    for layer in made.layers if form != "auto" else ():
        for slot in ("qkv", "out", "gate_up", "down"):
            plain = getattr(layer, slot)
            assert isinstance(plain, Plain)
            setattr(layer, slot, kept(plain, form))
    return made


def cached(
    net: Llama, step: str = "none", kv: torch.dtype | None = None, way: str = "layers"
) -> Engine:
    """An engine whose cache is over its budget after the prompt of `told`."""
    rules = Rules()
    if step != "none":
        evicts = policies.step_policy(step, SOON.get(step))
        rules = Rules(policies.prompt_policy("adakv", None), evicts, Budget.parse(40))
    made = over(net, rules, kv=kv)
    if way != "layers":
        made.ops.layers = None
    if way == "operations":
        made.ops.layer_tail = None
    net.use(made.ops)
    return Engine(net, made)


def told(engine: Engine, steps: int = TOKENS) -> list[Tensor]:
    """The logits of a prompt and of some steps after it."""
    found = [engine.prompt(ids(70))]
    for _ in range(steps):
        found.append(engine.step(int(found[-1].argmax())))
    return found


def alike(first: list[Tensor], *others: list[Tensor]) -> None:
    """The same logits."""
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each call computed."""
    found: list[int] = []
    run = layers._layers
    monkeypatch.setattr(layers, "_layers", lambda *given: found.append(given[4]) or run(*given))
    return found


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    with torch_threads(request.param):
        yield


KINDS = [*SHAPES], ("auto", "int8", "int4"), (None, 20), (1, 2), ("", *SOME)
CACHES = STEPS, (None, torch.int8)
_TURNS = zip(product(*CACHES), cycle(pairwise(*KINDS)), strict=False)
DAILY = [(*cache, *kind) for cache, kind in _TURNS]
"""Every cache, beside which the kinds of networks take turns."""
WAYS = ("layers", "layer_tail", "operations")
"""One call for all layers, one for what follows attention in each, one for each operation."""


@pytest.mark.parametrize(
    ("step", "kv", "shape", "form", "window", "threads", "family"),
    some_by_day(dict.fromkeys([*DAILY, *pairwise(*CACHES, *KINDS)]), DAILY.__contains__),
    indirect=["threads"],
    ids=str,
)
def test_a_step_is_that_of_separate_calls(
    step: str, kv: Any, shape: str, form: str, window: Any, threads: None, family: str, calls: Any
) -> None:
    net = network(shape, form, window, family=family)
    found, caches = [], []
    for way in WAYS:
        engine = cached(net, step, kv, way)
        if form == "int4" and way != "operations" and not net._tails:
            pytest.skip("C does not take matrices of four bits in this layout")
        assert (net._layers is not None, net._tails != []) == (way == "layers", way != WAYS[-1])
        found.append(told(engine))
        caches.append(engine.kv)
    alike(*found)
    assert all(bool(logits.isfinite().all()) for logits in found[0])
    # C's hashing does not take int8, and its call for all layers shows nobody the queries.
    apart = step == "triattention" or (step == "hashevict" and kv is not None)
    assert calls == ([] if apart else [3] * TOKENS)
    same(*caches[:2])
    same(*caches[1:])


def test_rows_before_the_window_are_not_seen() -> None:
    """A cache reuses the row that slid out, so nothing else hides one."""
    net = network(window=20)
    found = {}
    for together, hidden in product((True, False), (True, False)):
        engine = cached(net, way=WAYS[not together])
        engine.prompt(ids(70))
        step = engine.kv.begin_step()
        if hidden:
            step.eviction.oldest_seen[1:] = 65
        found[together, hidden] = net.forward(torch.tensor([5]), step)
    assert torch.equal(found[True, True], found[False, True])
    assert torch.equal(found[True, False], found[False, False])
    assert not torch.equal(found[True, True], found[True, False])


def same(one: KVCache, two: KVCache) -> None:
    """Both hold the same rows, in every column."""
    a, b = one.arena, two.arena
    assert torch.equal(a.length, b.length)
    assert a.columns.keys() == b.columns.keys()
    for layer, head in product(range(len(a.length)), range(a.length.shape[1])):
        start, count = int(a.start[layer, head]), int(a.length[layer, head])
        for name, column in a.columns.items():
            rows = slice(start, start + count)
            assert torch.equal(column[rows], b.columns[name][rows]), name


def test_large_weights_are_read_in_several_calls(calls: list[int], monkeypatch: Any) -> None:
    net = network(count=5)
    want = told(cached(net, way="layer_tail"))
    net.use(cached(net).kv.ops)
    layer = net._tails[0]
    assert isinstance(layer, layers.LayerTail)
    monkeypatch.setattr(layers, "_AT_ONCE", 2 * layer.nbytes)
    alike(want, told(cached(net)))
    assert calls == [2, 2, 1] * TOKENS


@pytest.mark.parametrize("step", ["none", "roco", "l2", "hashevict"])
@pytest.mark.parametrize("done", [0, 1])
def test_a_step_without_memory_leaves_an_empty_cache(
    step: str, done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not some layers were done. What is read again is as before."""
    net = network(count=4)
    layer = net.layers[0]
    nbytes = 2 * sum(m.dense().numel() for m in (layer.out, layer.gate_up, layer.down))
    monkeypatch.setattr(layers, "_AT_ONCE", 2 * nbytes)
    engine = cached(net, step)
    want = told(engine, 4)
    run, fault = layers._layers, MemoryError("a step found no memory")
    failing = Mock(side_effect=[*[DEFAULT] * done, fault], wraps=run)
    with monkeypatch.context() as patch:
        patch.setattr(layers, "_layers", failing)
        net.use(engine.kv.ops)
        with pytest.raises(MemoryError, match="a step found no memory"):
            engine.step(5)
    net.use(engine.kv.ops)
    assert engine.kv.position == 0
    alike(want, told(engine, 4))


def test_steps_that_open_anew_read_the_new_arena() -> None:
    net = network()
    engine = cached(net)
    told(engine, 2)
    decode = DecodeStep(engine.kv.shape, engine.kv.device, engine.kv.ops)
    first = engine.kv.arena.grown(engine.kv.arena.capacity + 4)
    second = first.grown(first.capacity + 4)
    second.columns["v"].fill_(1.0)
    found = []
    for arena in (first, second):  # without `close`
        decode.open(arena, None, 72)
        found.append(net.forward(torch.tensor([5]), decode))
    assert not torch.equal(*found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Own(HashEvict):
    """Needs the query, and no kernel has its name."""

    name: str = "own"


def test_a_policy_that_needs_the_query_is_asked_layer_by_layer(calls: list[int]) -> None:
    """Where it has no kernel. Then a step keeps the same rows, with the same codes."""
    net, runs = network(), []
    for kind in (Own, HashEvict):
        engine = cached(net, "hashevict")
        rules = engine.kv.rules
        policy = kind(sinks=4, recent=1, bits=8, hash_with="query", seed=0)
        engine.kv.configure(Rules(rules.prompt, policy, rules.budget))
        runs.append((engine.kv, told(engine)))
    assert calls == [3] * TOKENS
    (one, mine), (two, other) = runs
    alike(mine, other)
    same(one, two)
    assert one.begin_step().step_arena() is None


def test_what_it_does_not_take() -> None:
    """Layers of different sizes, another kernel's layers, no layers; and an arena of float32."""
    net = network()
    kv = cached(net).kv
    tails, more = net._tails, ([(None, None)] * 3, [0] * 3)
    assert layers.layers(tails, *more) is not None
    assert layers.layers([], *more) is None
    assert layers.layers([*tails[:-1], lambda x, mixed: x], *more) is None
    assert layers.layers([tails[-1], tails[-1]], *more) is None  # only the last one ends it
    wide = network("one")
    wide.use(kv.ops)
    assert layers.layers([tails[0], wide._tails[-1]], *more) is None
    exact = randomise(Llama(net.config), 1)
    made = over(exact)
    exact.use(made.ops)
    assert exact._layers is None
    assert made.begin_step().step_arena() is None


def test_tiles_are_used_where_attention_of_a_step_uses_them() -> None:
    for processor in choice.CHOICES:
        engine = cached(network())
        engine.kv.decode.ops, _ = dispatch.choose(
            torch.device("cpu"), "auto", 32, torch.bfloat16, processor
        )
        engine.prompt(ids(70))
        made = engine.kv.begin_step().step_arena()
        assert isinstance(made, layers.StepArena)
        assert made.tiles == (processor == "amx" and prefill.TILES.available())


def test_the_arena_is_released_when_the_steps_end() -> None:
    engine = cached(network(), "h2o")
    told(engine, 2)
    column = weakref.ref(engine.kv.decode.eviction.arena.columns["k"])
    made = engine.kv.decode.step_arena()
    assert isinstance(made, layers.StepArena)
    assert made is engine.kv.decode.step_arena()  # made once
    kept_by = weakref.ref(made)
    del made
    engine.reset()
    gc.collect()
    assert kept_by() is None
    assert column() is None


def test_a_long_text_is_read_by_threads_whatever_the_weights() -> None:
    """Any number of threads makes the same numbers as one, in one call and in many."""
    net, found = network("one"), []
    for threads, together in product((1, 3), (True, False)):
        engine = cached(net, way=WAYS[not together])
        with torch_threads(1):
            engine.prompt(ids(2500))
        with torch_threads(threads):
            found.append([engine.step(token) for token in ids(3)])
    alike(*found)


def test_matrices_that_it_does_not_take() -> None:
    """float32, rows that lie apart, an MLP that is not whole blocks, and an unknown layout."""
    norm, ones = torch.ones(32, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
    taken = []
    for half in (16, 32):
        packed = [
            Matrix(
                *(rows, 64),
                torch.zeros(rows, 32, dtype=torch.uint8),
                torch.zeros(2, rows, 2, dtype=torch.bfloat16),
                *(None, half),
            )
            for rows in (64, 128, 64)
        ]
        taken.append(layers.layer_tail(*packed, None, ones, ones, 1e-5) is not None)
    assert not all(taken)
    square, gate_up, down = (
        Matrix(rows, n, torch.zeros(rows, n, dtype=torch.bfloat16))
        for rows, n in ((32, 32), (128, 32), (32, 64))
    )
    assert layers.layer_tail(square, gate_up, down, None, norm, norm, 1e-5) is not None
    wide = Matrix(32, 32, torch.zeros(32, 32))
    apart = Matrix(32, 32, torch.zeros(32, 64, dtype=torch.bfloat16)[:, :32])
    for bad in (wide, apart):
        assert layers.layer_tail(bad, gate_up, down, None, norm, norm, 1e-5) is None
        assert layers.layer_tail(square, gate_up, down, bad, norm, norm, 1e-5) is None
    assert layers.layer_tail(square, gate_up, down, None, norm.float(), norm, 1e-5) is None
    biased = Matrix(32, 32, square.weights, None, torch.zeros(32))
    assert layers.layer_tail(biased, gate_up, down, None, norm, norm, 1e-5) is None
    odd = (Matrix(rows, n, torch.zeros(rows, n).bfloat16()) for rows, n in ((80, 32), (32, 40)))
    assert layers.layer_tail(square, *odd, None, norm, norm, 1e-5) is None
