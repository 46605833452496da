"""All layers of a step in one call: bit for bit what the calls of each layer make one after the
other, with every step policy, in the network's numbers and in the cache."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import half_network
import pytest
import torch
from pairwise import pairwise, some_by_day
from small import SOON, VOCAB, ids, over
from torch import Tensor

from minikv import policies
from minikv.cache.budget import Budget
from minikv.cache.decode_step import DecodeStep
from minikv.cache.kv_cache import KVCache
from minikv.cache.rules import Rules
from minikv.engine.engine import Engine
from minikv.engine.sampling import Sampling
from minikv.kernels import dispatch
from minikv.kernels.attention import cpu as prefill
from minikv.kernels.layer import cpu as layers
from minikv.kernels.layer import cpu as rest
from minikv.kernels.layer.cpu import StepArena
from minikv.kernels.native import build, choice
from minikv.models.llama import Llama
from minikv.policies.hashevict import HashEvict

pytestmark = pytest.mark.skipif(build.find() is None, reason="no C compiler on this system")

STEPS = [*policies.step_names()]
SHAPES = {"3 queries": (6, 2, 32), "one": (2, 2, 24), "5": (10, 2, 16)}
"""Heads, KV heads and head size."""


def network(
    shape: str = "3 queries", form: str = "auto", window: int | None = None, count: int = 3
) -> Llama:
    sizes = count, 128, *SHAPES[shape], 640
    return half_network.packed(half_network.made(*sizes, vocab=VOCAB, window=window), form)


def cached(
    net: Llama,
    step: str = "none",
    kv: torch.dtype | None = None,
    together: bool = True,
    options: dict[str, object] | None = None,
) -> Engine:
    """An engine whose cache is over its budget after the prompt of `told`."""
    rules = Rules()
    if step != "none":
        rules = Rules(
            policies.prompt_policy("adakv", None),
            policies.step_policy(step, options or SOON.get(step)),
            Budget.parse(40),
        )
    made = over(net, rules, kv=kv)
    if not together:
        made.ops.layers = None
    net.use(made.ops)
    return Engine(net, made)


def told(engine: Engine, steps: int = 12) -> list[Tensor]:
    """The logits of a prompt and of some steps after it."""
    found = [engine.prompt(ids(70))]
    for _ in range(steps):
        found.append(engine.step(int(found[-1].argmax())))
    return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each call computed."""
    found: list[int] = []
    library = layers._library()

    class Counted:
        def minikv_layers(self, *given: Any) -> int:
            found.append(given[4])
            failed: int = library.minikv_layers(*given)
            return failed

    monkeypatch.setattr(layers, "_library", Counted)
    return found


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


CASES = (
    STEPS,
    [*SHAPES],
    ("auto", "int8", "int4"),
    (None, torch.int8),
    (None, 20),
    (1, 2),
)


@pytest.mark.parametrize(
    ("step", "shape", "form", "kv", "window", "threads"),
    some_by_day(product(*CASES), {*pairwise(*CASES)}.__contains__),
    indirect=["threads"],
    ids=str,
)
def test_a_step_is_that_of_separate_calls(
    step: str,
    shape: str,
    form: str,
    kv: torch.dtype | None,
    window: int | None,
    threads: int,
    calls: list[int],
) -> None:
    net = network(shape, form, window)
    one, two = (cached(net, step, kv, together) for together in (False, True))
    net.use(one.kv.ops)
    apart = told(one)
    assert calls == []
    net.use(two.kv.ops)
    for mine, other in zip(apart, told(two), strict=True):
        assert torch.equal(mine, other)
        assert bool(mine.isfinite().all())
    coded = step == "hashevict" and kv is not None  # C's hashing does not take int8
    taken = not coded and net._layers is not None
    assert calls == ([3] * 12 if taken else [])
    assert form == "int4" or net._layers is not None
    same(one.kv, two.kv)


@pytest.mark.parametrize("bits", [8, 16, 31, 60])
@pytest.mark.parametrize("hash_with", ["query", "key"])
def test_hashevict_with_other_codes(bits: int, hash_with: str, calls: list[int]) -> None:
    net, options = network("5"), {"bits": bits, "hash_with": hash_with}
    one, two = (cached(net, "hashevict", None, together, options) for together in (False, True))
    net.use(one.kv.ops)
    apart = told(one, 20)
    net.use(two.kv.ops)
    for mine, other in zip(apart, told(two, 20), strict=True):
        assert torch.equal(mine, other)
    assert calls == [3] * 20
    same(one.kv, two.kv)
    held = two.kv.arena.columns["pos"]
    assert int(held.max()) == 89  # the newest row overwrote an older one
    assert int((held > 69).sum()) > 20


def test_rows_before_the_window_are_not_seen() -> None:
    """A cache reuses the row that slid out, so nothing else hides one."""
    net = network(window=20)
    found = {}
    for together, hidden in product((True, False), (True, False)):
        engine = cached(net, together=together)
        engine.prompt(ids(70))
        step = engine.kv.begin_step()
        if hidden:
            step.oldest_seen[1:] = 65
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


def test_large_weights_are_read_in_several_calls(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = network(count=5)
    want = told(cached(net, together=False))
    net.use(cached(net).kv.ops)
    layer = net._tails[0]
    assert isinstance(layer, rest.Rest)
    monkeypatch.setattr(layers, "_AT_ONCE", 2 * layer.nbytes)
    for mine, other in zip(want, told(cached(net)), strict=True):
        assert torch.equal(mine, other)
    assert calls == [2, 2, 1] * 12


@pytest.mark.parametrize("sizes", [[5], [5, 5, 5], [9, 1, 1, 9], [100, 100]])
def test_spans_hold_each_layer_once(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_AT_ONCE", 10)
    spans = [*layers._spans(sizes)]
    assert [i for span in spans for i in span] == [*range(len(sizes))]
    assert all(len(span) == 1 or sum(sizes[i] for i in span) <= 10 for span in spans)


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
    library, left = layers._library(), done

    class Failing:
        def minikv_layers(self, *given: Any) -> int:
            nonlocal left
            left -= 1
            return 1 if left < 0 else int(library.minikv_layers(*given))

    with monkeypatch.context() as patch:
        patch.setattr(layers, "_library", Failing)
        net.use(engine.kv.ops)
        with pytest.raises(MemoryError, match="a step found no memory"):
            engine.step(5)
    net.use(engine.kv.ops)
    assert engine.kv.position == 0
    for mine, other in zip(want, told(engine, 4), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("step", ["streaming", "l2", "hashevict", "roco"])
@pytest.mark.parametrize("pinned", [0, 30])
def test_what_a_step_writes_before_it_ends(step: str, pinned: int) -> None:
    """A row of every head in every column: where the policy evicts first, over one that was in use
    and is not pinned; else over none."""
    net = network()
    found = []
    for together in (True, False):
        engine = cached(net, step, together=together)
        told(engine, 3)
        arena, policy = engine.kv.arena, engine.kv.rules.step
        assert policy is not None
        decode = DecodeStep(engine.kv.shape, engine.kv.device, engine.kv.ops)
        columns = {name: column.clone() for name, column in arena.columns.items()}
        free_slot = arena.free_slot.clone()
        decode.open(arena, policy, 73, pinned=pinned)
        assert (net._layers is not None) == together
        logits = net.forward(torch.tensor([5]), decode)
        new = arena.columns["pos"] != columns["pos"]
        assert int(new.sum()) == 6
        for name, column in arena.columns.items():
            assert torch.equal(column[~new], columns[name][~new]), name
        if policy.evict_first:
            assert int(columns["pos"][new].min()) >= pinned
        else:
            assert new.nonzero()[:, 0].tolist() == sorted(free_slot.flatten().tolist())
        found.append((logits, new))
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


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


def test_what_is_drawn_is_the_same() -> None:
    """The engine's own loop, which feeds each drawn token."""
    net = network()
    found = []
    for together in (True, False):
        engine = cached(net, "h2o", together=together)
        token, drawn = int(engine.prompt(ids(70)).argmax()), []
        for _ in range(10):
            token = engine.next(token, VOCAB, Sampling(temperature=1.0), 5)
            drawn.append(token)
        found.append(drawn)
    assert found[0] == found[1]
    assert len({*found[0]}) > 2


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
    assert calls == [3] * 12
    (one, mine), (two, other) = runs
    assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
    same(one, two)
    assert one.begin_step().step_arena() is None


def test_every_policy_is_served() -> None:
    for step in STEPS:
        engine = cached(network(), step)
        engine.prompt(ids(70))
        assert engine.kv.begin_step().step_arena() is not None, step


def test_what_it_does_not_take() -> None:
    """Layers of different sizes, another kernel's layers, no layers; and an arena of float32."""
    net = network()
    kv = cached(net).kv
    rests = net._tails
    assert layers.layers(rests) is not None
    assert layers.layers([]) is None
    assert layers.layers([*rests[:-1], lambda x, mixed: x]) is None
    assert layers.layers([rests[-1], rests[-1]]) is None  # only the last one ends the network
    wide = network("one")
    wide.use(kv.ops)
    assert layers.layers([rests[0], wide._tails[-1]]) is None
    exact = Llama(net.config).randomise(1)
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
        assert isinstance(made, StepArena)
        assert made.tiles == (processor == "amx" and prefill.TILES.available())


def test_the_arena_is_released_when_the_steps_end() -> None:
    engine = cached(network(), "h2o")
    told(engine, 2)
    column = weakref.ref(engine.kv.decode.arena.columns["k"])
    made = engine.kv.decode.step_arena()
    assert isinstance(made, StepArena)
    assert made is engine.kv.decode.step_arena()  # made once
    kept_by = weakref.ref(made)
    del made
    engine.reset()
    gc.collect()
    assert kept_by() is None
    assert column() is None


def test_a_long_text_is_read_by_threads_whatever_the_weights() -> None:
    """Any number of threads makes the same numbers as one, in one call and in many."""
    net, before = network("one"), torch.get_num_threads()
    found = []
    try:
        for threads, together in product((1, 2, 3), (True, False)):
            torch.set_num_threads(1)
            engine = cached(net, together=together)
            engine.prompt(ids(2500))
            torch.set_num_threads(threads)
            found.append([engine.step(token) for token in ids(3)])
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        for one, two in zip(found[0], others, strict=True):
            assert torch.equal(one, two)
