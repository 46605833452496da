"""The cache against its oracle: nothing evicted means nothing changed, and what is evicted is
exactly what a mask over the full cache would hide."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from faults import Allocations, Fault
from layouts import segment
from pairwise import beside
from refusals import failing, refused
from small import FAMILIES, PAIRS, SOON, Dense, Walk, by_day, engine, ids, network, scheduler
from tiers import tiered
from torch import Tensor
from views import kept

from minikv import policies
from minikv.cache.arena import Arena
from minikv.cache.budget import Budget
from minikv.cache.kv_cache import KVCache
from minikv.cache.second_pass import SecondPass
from minikv.cache.snapshot import Outcome
from minikv.chat.eviction_config import EvictionConfig
from minikv.errors import ContextError, NumericsError
from minikv.models.llama import Llama


def two_turns(runner: object, first: int, second: int, answer: int = 6) -> list[Tensor]:
    logits = []
    for turn, length in enumerate((first, second)):
        logits.append(runner.prompt(ids(length, seed=turn)))  # type: ignore[attr-defined]
        for token in ids(answer, seed=10 + turn):
            logits.append(runner.step(token))  # type: ignore[attr-defined]
    return logits


@pytest.mark.parametrize(
    ("prompt", "step", "family", "second"), by_day(beside(PAIRS, ("", *FAMILIES), (1, 7, 33)))
)
def test_budget_above_length_changes_no_bit(
    prompt: str, step: str, family: str, second: int
) -> None:
    """Unless a window slides: see `DenseAttend`."""
    net = network(**FAMILIES.get(family, {}) | {"windows": None})
    got = two_turns(engine(net, prompt, step, 128), 45, second)
    want = two_turns(Dense(net), 45, second)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


class MaskedDense:
    """The full cache with a mask: what an evicted cache must agree with.

    hidden[layer][head] are positions that were evicted before the current forward.
    """

    def __init__(self, net: Llama) -> None:
        c = net.config
        self.net, self.position = net, 0
        self.hidden = [[set[int]() for _ in range(c.kv_heads)] for _ in range(c.layers)]
        self.k: list[list[Tensor]] = [[] for _ in range(c.layers)]
        self.v: list[list[Tensor]] = [[] for _ in range(c.layers)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.k[layer].append(k)
        self.v[layer].append(v)
        keys, values = torch.cat(self.k[layer]).double(), torch.cat(self.v[layer]).double()
        end, heads, _ = keys.shape
        rows = len(q)
        query = q.unflatten(1, (heads, -1)).double()
        logits = torch.einsum("thgd,nhd->htgn", query, keys) / math.sqrt(q.shape[-1])
        at, pos = torch.arange(end - rows, end), torch.arange(end)
        seen = (pos <= at[:, None]).expand(heads, rows, end).clone()
        for head, gone in enumerate(self.hidden[layer]):
            if gone:
                seen[head][:, list(gone)] = False
        window = self.net.config.windows[layer]
        if window is not None:
            seen &= pos > at[:, None] - window
        p = logits.masked_fill(~seen[:, :, None], -math.inf).softmax(-1)
        return torch.einsum("htgn,nhd->thgd", p, values).flatten(1, 2).to(q.dtype)

    def advance(self, tokens: int) -> None:
        self.position += tokens

    def hide_all_but(self, kv: KVCache, rows: Callable[[int, int], Tensor]) -> None:
        for layer, heads in enumerate(self.hidden):
            for head in range(len(heads)):
                heads[head] = set(range(kv.position)) - set(rows(layer, head).tolist())


KINDS: dict[str, dict[str, Any]] = {"": {}, "windows": {"windows": (20, None, 70)}} | FAMILIES


@pytest.mark.parametrize(("prompt", "step", "kind"), by_day(beside(PAIRS, (*KINDS,))))
def test_an_evicted_cache_is_a_masked_full_cache(prompt: str, step: str, kind: str) -> None:
    """Three prompts and answers, against a full cache that hides what is no longer there. The
    output of the first prompt, from which nothing has left, is the same to the bit."""
    net = network(**KINDS[kind])
    run = engine(net, prompt, step, 48)
    oracle = MaskedDense(net)

    def compare(got: Tensor, tokens: list[int]) -> None:
        want = net.forward(torch.tensor(tokens), oracle)
        assert (got - want).abs().max() < 2e-4 * want.abs().max()

    for turn in range(3):
        tokens = ids(90 - 30 * turn, seed=turn)
        oracle.hide_all_but(run.kv, run.kv.kept)
        logits = run.prompt(tokens)
        compare(logits, tokens)
        if not turn and not any(net.config.windows):  # see `DenseAttend`
            assert torch.equal(logits, Dense(net).prompt(tokens))
        for token in ids(8, seed=50 + turn):
            if run.kv.rules.step is not None and run.kv.rules.step.block > 1:
                oracle.hide_all_but(run.kv, run.kv.kept)  # what leaves with the step is then gone
                got = run.step(token)
            else:
                # Rows in memory right after a step are those that its query saw: a row chosen to
                # leave is overwritten by the next newcomer, before attention.
                got = run.step(token)
                oracle.hide_all_but(run.kv, partial(segment, run.kv.arena, "pos"))
            compare(got, [token])


@pytest.mark.parametrize(("prompt", "step"), by_day(PAIRS))
def test_a_stopped_prompt_leaves_no_trace(prompt: str, step: str) -> None:
    """Stopped at every chunk of every layer: of two policies each at a half of them, some in the
    first turn, the others in the second."""
    net, late = network(rows=32), 2 * (PAIRS.index((prompt, step)) % 2)

    plain, stopped = (engine(net, prompt, step, 48) for _ in range(2))
    for turn in range(2):
        tokens, count = ids(70, seed=turn), Mock()
        want = plain.prompt(tokens, progress=count)
        twice = prompt.startswith("kvzip")  # it reads everything twice
        assert count.call_count == 3 * 3 * (1 + twice)  # layers x chunks
        for at in range(1 + turn + late, count.call_count + 1, 4):
            stop = Mock(side_effect=[None] * (at - 1) + [ZeroDivisionError])
            before = kept(stopped.kv) if turn else None
            with pytest.raises(ZeroDivisionError):
                stopped.prompt(ids(75, seed=99 + at) if at % 4 > 1 else tokens, progress=stop)
            if turn:
                assert kept(stopped.kv) == before
        assert torch.equal(stopped.prompt(tokens), want)
        for token in ids(12, seed=20 + turn):
            assert torch.equal(stopped.step(token), plain.step(token))


@pytest.mark.parametrize("step", policies.step_names())
def test_a_failed_step_drops_the_cache(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in any layer of a step: the cache is empty, its memory is free, and it is as good as
    a new one. That needs no memory."""
    monkeypatch.setattr(KVCache, "attend_unrotated", None)
    net = network()
    run, other = (engine(net, "adakv", step, 48) for _ in range(2))
    other.prompt(ids(100))
    attend = run.kv.attend
    for broken in range(3):
        run.prompt(ids(100))
        run.step(1)

        def fail(layer: int, q: Tensor, k: Tensor, v: Tensor, broken: int = broken) -> Tensor:
            out = attend(layer, q, k, v)
            if layer == broken:
                raise MemoryError
            return out

        run.kv.attend = fail  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            run.step(5)
        run.kv.attend = attend  # type: ignore[method-assign]
        assert (run.kv.position, run.kv._arena.rows, run.kv.decode.nbytes) == (0, 0, 0)
        assert run.kv.stats().seen == 0
    run.prompt(ids(100))
    with Allocations(Fault("allocation", 1, lasting=True)):
        run.kv.discard()
    assert (run.kv.position, run.kv._arena.rows) == (0, 0)
    run.prompt(ids(100))
    for token in ids(4):
        assert torch.equal(run.step(token), other.step(token))


def test_nan_logits_stop_the_turn() -> None:
    """Of a prompt they change nothing; those of a step drop the cache."""
    net = network()
    run = engine(net, "adakv", "roco", 48)
    run.prompt(ids(100))
    run.step(3)
    before = kept(run.kv)
    net.norm[0] = float("nan")
    refused("reading", run.prompt, ids(9), error=NumericsError)
    assert (run.kv.position, kept(run.kv)) == (101, before)
    refused("writing", run.step, 1, error=NumericsError)
    assert run.kv.position == 0
    net.norm[0] = 1.0
    assert torch.isfinite(run.prompt(ids(100))).all()


def test_context_is_refused_not_cut() -> None:
    run = engine(network(max_context=64), "full", "none", None)
    run.prompt(ids(60))
    refused("5 tokens do not fit: 4 of 64", run.prompt, ids(5), error=ContextError)
    assert run.kv.position == 60
    for token in ids(4):
        run.step(token)
    refused("", run.step, 1, error=ContextError)


def test_answers_without_eviction_outgrow_their_room() -> None:
    """`--decode none` keeps every row of the answer, however long it is."""
    net = network()
    run, dense, oracle = engine(net, "adakv", "none", 48), engine(net, budget=None), Dense(net)
    for each in (run, dense, oracle):
        each.prompt(ids(100))  # type: ignore[attr-defined]
        for token in ids(300, seed=2):
            assert each.step(token).isfinite().all()  # type: ignore[attr-defined]
    assert run.kv.stats().kept_mean == 48 + 300
    assert dense.kv.stats().kept_min == 400
    torch.testing.assert_close(dense.step(7), oracle.step(7))


def test_configure_takes_effect_at_the_next_prompt_and_gives_memory_back() -> None:
    net = network()
    run = engine(net, "full", "none", None)
    run.prompt(ids(400))
    big = run.kv.stats().allocated_bytes
    small = scheduler(net, "adakv", "roco", 40).rules
    run.kv.configure(small)
    assert run.kv.stats().kept_min == 400
    run.prompt(ids(5))
    assert run.kv.stats().kept_mean == 40
    assert run.kv.stats().allocated_bytes < big / 2
    run.step(1)
    refused("too small", run.kv.configure, replace(small, budget=Budget.parse(1)))
    assert run.kv.rules.prompt is small.prompt
    run.step(2)
    run.reset()
    assert run.kv.stats().allocated_bytes == 0


def test_without_memory_for_its_columns_a_policy_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = engine(network(), "adakv", "h2o", 48)
    run.prompt(ids(60))
    before, columns = run.kv.rules.step, dict(run.kv.arena.columns)
    with monkeypatch.context() as patch:
        patch.setattr("minikv.cache.arena.torch.zeros", failing(MemoryError()))
        with pytest.raises(MemoryError):
            run.kv.configure(replace(run.kv.rules, step=policies.step_policy("roco")))
    assert run.kv.rules.step is before
    assert run.kv.arena.columns.keys() == columns.keys()
    assert all(run.kv.arena.columns[name] is column for name, column in columns.items())


@pytest.mark.parametrize("step", policies.step_names())
def test_official_rounding_may_exceed_the_budget(step: str) -> None:
    """The authors' rounding drifts by up to half a row a head, and the arena has place for it."""
    drifts, options = set(), {"rounding": "official", "alpha": 0.5, "window": 4}
    for seed in range(8):
        net = network(heads=12, kv_heads=6, head_dim=4, seed=seed)
        run = engine(net, "adakv", step, 32, prompt_options=options)
        run.prompt(ids(100), room=2)
        drifts |= set((run.kv.arena.held.sum(1) - 6 * 32).tolist())
        for token in ids(3):
            assert run.step(token).isfinite().all()
    assert max(drifts) > 0
    assert min(drifts) < 0
    assert max(map(abs, drifts)) <= 3


def test_a_share_is_of_the_prompt_that_was_read() -> None:
    """Not of one that was stopped; after `configure`, of the conversation that is evicted next."""
    net = network()
    run = engine(net, "adakv", "roco", "20%")
    with pytest.raises(KeyboardInterrupt):
        run.prompt(ids(900), progress=failing(KeyboardInterrupt()))
    assert run.kv.state.rows is None
    run.prompt(ids(400))
    assert run.kv.state.rows == run.kv.stats().kept_mean == 80
    run.prompt(ids(400))
    assert run.kv.stats().kept_mean == 80

    run = engine(net, "full", "none", None)
    run.prompt(ids(380))
    run.kv.configure(scheduler(net, "adakv", "roco", "20%").rules)
    run.prompt(ids(20))
    assert run.kv.stats().kept_mean == 80
    run.reset()
    run.prompt(ids(300))
    assert run.kv.stats().kept_mean == 60


@pytest.mark.parametrize(("prompt", "step"), [("adakv", "roco"), ("full", "streaming")])
@pytest.mark.parametrize("budget", [10**6, 10**20, "64GiB"])
def test_a_budget_beyond_the_context_takes_no_more_than_the_context(
    prompt: str, step: str, budget: int | str
) -> None:
    run = engine(network(max_context=100), prompt, step, budget)
    run.prompt(ids(20))
    arena = run.kv.arena
    assert arena.rows <= 3 * 3 * 101
    for token in ids(80):
        run.step(token)
    assert (arena.held == 100).all()


# -- what it tells --------------------------------------------------------------------------------


def test_a_layer_without_room_for_what_is_protected_is_refused() -> None:
    """A budget of 12 for a window of 8 falls by 4 from layer to layer, which leaves the last one
    nothing beside the window; minikv's own line leaves it a row."""
    options: dict[str, object] = {"window": 8}
    run = engine(network(), "pyramidkv", "none", 12, prompt_options=options | {"line": "official"})
    refused("leaves a layer 8 tokens per head, of which 8 are", run.prompt, ids(90))
    assert run.kv.position == 0
    run = engine(network(), "pyramidkv", "none", 12, prompt_options=options)
    run.prompt(ids(90))
    assert run.kv.stats().kept_min == 9


@pytest.mark.parametrize("window", [None, 30, 90])
@pytest.mark.parametrize("step", ["none", "roco", "streaming"])
def test_a_cut_cache_has_never_seen_the_rest(step: str, window: int | None) -> None:
    net, tokens = network(windows=(window, None)), ids(60)
    some, all_rows = engine(net, "snapkv", step, 48), engine(net, "snapkv", step, 128)
    for runner in (some, all_rows):
        runner.prompt(tokens)
        for token in ids(9, seed=1):
            runner.step(token)
    before = kept(some.kv)
    some.kv.cut(55)
    all_rows.kv.cut(55)
    if window == 30:  # its layer has lost rows that the tokens before 55 need
        assert some.kv.position == all_rows.kv.position == 0
        return
    some.kv.cut(55)  # once more changes nothing
    assert kept(some.kv) == [[p for p in rows if p < 55] for rows in before]
    assert (some.kv.stats().seen, some.kv.state.turns) == (55, ((0, 55),))
    assert some.prompt(ids(7, seed=2)).isfinite().all()
    fresh = Dense(net)
    fresh.prompt(tokens[:55])
    for turn in (2, 3):
        got, want = (each.prompt(ids(7, seed=turn)) for each in (all_rows, fresh))
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_after_an_error_in_cutting_the_cache_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = engine(network(), "snapkv", "roco", 48)
    runner.prompt(ids(60))
    monkeypatch.setattr(Arena, "index", None)
    with pytest.raises(TypeError):
        runner.kv.cut(50)
    assert runner.kv.position == 0


def test_a_shared_snapshot_holds_the_tiers_rows_too() -> None:
    """Of two recalls after it the second is not wanted, and what it added to the tier is not."""
    run = tiered(engine(network(), "snapkv", "roco", 44))
    first = run.recall(ids(60))
    assert first.isfinite().all()
    before, held = run.kv.share(), run.kv.tier.length
    run.recall([*ids(60), *ids(30, seed=1)])
    assert run.kv.tier.length == 90
    run.kv.restore(before)
    assert (run.kv.position, run.kv.tier.length) == (60, held)


@pytest.mark.parametrize("then", ["settle", "step", "stats"])
def test_a_step_that_an_interrupt_left_drops_the_cache(then: str) -> None:
    """The next caller finds it empty, and no step continues from there; a step that was not begun
    drops nothing."""
    run = engine(network(), "snapkv", "roco", 44)
    run.prompt(ids(60))
    run.kv.settle()
    assert run.kv.position == 60
    run.kv.begin_step()  # and nothing ended it
    with pytest.raises(RuntimeError, match="interrupted") if then == "step" else nullcontext():
        run.step(1) if then == "step" else getattr(run.kv, then)()
    assert (run.kv.position, run.kv.stats().kept_max) == (0, 0)


def test_a_cache_never_keeps_more_than_twice_the_memory_that_it_needs() -> None:
    """Room that was made for a long answer is given back by a prompt with a short one; room that is
    little more than needed is kept, and nothing is copied."""
    run = engine(network(), "full", "none", None)
    run.prompt(ids(100), room=1000)
    wide = run.kv.arena.rows
    run.prompt(ids(50), room=300)
    assert run.kv.arena.rows == 9 * 450 < wide / 2
    address = run.kv.arena.columns["k"].data_ptr()
    run.prompt(ids(10), room=100)
    assert run.kv.arena.rows == 9 * 450
    assert run.kv.arena.columns["k"].data_ptr() == address


@pytest.mark.parametrize("step", ["none", "tova"])
def test_the_smallest_budget_beside_pins_is_what_the_message_says(step: str) -> None:
    """Without a step policy only the prompt policy's own rows are among the pinned ones."""
    options: dict[str, object] = {"window": 8, "sinks": 0}
    need = 5 + 8 + 1
    run = engine(network(), "snapkv", step, need, prompt_options=options)
    run.kv.pin(5)
    run.prompt(ids(60))
    run = engine(network(), "snapkv", step, need - 1, prompt_options=options)
    assert f"is {need} tokens" in refused("", run.kv.pin, 5).hint


def test_what_fits_a_window_and_the_budget_is_not_judged() -> None:
    """Nothing leaves, so that nothing is lost, no question decided anything, and every head may
    grow to the budget, or to the window where that is less."""
    windows = (64, None, 24)
    run = engine(network(windows=windows), "snapkv", "roco", 40, prompt_options={"window": 8})
    run.prompt(ids(20))
    assert run.kv.state.outcome == Outcome((None, None, None))
    assert [row.unique().tolist() for row in run.kv.arena.cap] == [[40], [40], [24]]
    run.prompt(ids(60, seed=1))
    assert any(run.kv.state.outcome.lost)
    assert run.kv.state.outcome.shaped


UNASKED = {*"streaming l2 keydiff expected kvzip kvzip+ ada-expected random".split()}
"""Prompt policies that judge without the question."""


@pytest.mark.parametrize("name", [*policies.prompt_names(), "snapkv+global"])
def test_a_question_decided_what_stayed_where_it_was_looked_at(name: str) -> None:
    run = engine(network(), name, "none", None if name == "full" else 80)
    run.prompt(ids(30))
    assert not run.kv.stats().shaped
    run.prompt(ids(80, seed=1))
    assert run.kv.stats().shaped == (name not in {"full", *UNASKED})


def test_rows_that_go_back_to_the_old_addresses_are_the_same_rows() -> None:
    """As on a GPU, where a graph of steps holds those addresses."""
    here, there = (engine(network(), "snapkv", "roco", 40) for _ in range(2))
    there.kv.keeps_addresses = True
    places = set()
    for turn in range(3):
        assert torch.equal(*(each.prompt(ids(50, seed=turn)) for each in (there, here)))
        for token in ids(4, seed=9):
            assert torch.equal(there.step(token), here.step(token))
        places.add(there.kv.arena.columns["k"].data_ptr())
    assert len(places) == 1


def test_a_graph_is_not_taken_for_that_of_other_kernels() -> None:
    """`use` makes new counts and places of rows beside the same arena: no graph may read the old
    ones."""
    run = engine(network(), "snapkv", "none", 60)
    run.prompt(ids(100))
    decodes = []
    for _ in range(2):
        decodes.append(run.kv.begin_step(captured=True))
        run.kv._stepping = False  # nothing is computed
        run.kv.use(run.kv.ops)
    assert decodes[0].key != decodes[1].key


@pytest.mark.parametrize("step", ["roco", "rkv"])
def test_a_step_policy_that_needs_more_room_gets_it(step: str) -> None:
    """The prompt was read under one that needs no row above the cap."""
    walk = Walk(EvictionConfig.read("full", "hashevict", 40))
    walk.prompt(ids(40))
    assert torch.equal(walk.kv.arena.capacity, walk.kv.arena.cap)
    later = EvictionConfig.read("full", step, 40)
    walk.configure(replace(later, decode_options={**later.decode_options, **SOON.get(step, {})}))
    for token in ids(9):
        walk.step(token)


def test_all_of_a_later_prompt_is_scored_by_a_second_pass() -> None:
    """The first positions of the conversation are not; those of a later prompt are not first."""
    run = engine(network(), "kvzip", "none", 20)
    for first in (4, 0):
        run.kv.begin(60)
        assert isinstance(run.kv.reading, SecondPass)
        texts = [repeat for repeat, _ in run.kv.reading.texts(ids(60))]
        assert [texts[0].begin, texts[-1].end] == [first, 60]
        run.kv.abandon()
        run.prompt(ids(60))


@pytest.mark.parametrize("how", ["reset", "new rules", "use"])
def test_nothing_that_steps_work_with_outlives_them(how: str) -> None:
    """Where a conversation is forgotten, and where others compute: steps that are under way are
    finished, and their memory is free."""
    run = engine(network(), "snapkv", "tova", 48)
    run.prompt(ids(60))
    run.step(1)
    kv, asked = run.kv, []
    kv.before_settling = lambda: asked.append(kv.position)
    decode = kv.decode
    assert decode.nbytes > 0
    if how == "use":
        kv.use(kv.ops)
    else:
        kv.reset() if how == "reset" else kv.reset(kv.rules)
        assert (kv.position, kv._arena.rows) == (0, 0)
    assert asked[0] == 61
    assert not decode.is_open
    assert decode.nbytes == 0


@pytest.mark.parametrize(("first", "second"), [(40, 29), (40, 30), (40, 31), (69, 1), (1, 69)])
@pytest.mark.parametrize(("prompt", "step"), [("full", "none"), ("adakv", "streaming")])
def test_a_window_that_ends_with_a_later_prompt_has_lost_its_first_row(
    prompt: str, step: str, first: int, second: int
) -> None:
    """Rows may be added where the older ones lie. What the next token does not see is gone."""
    run = engine(network(windows=(70, None, 70)), prompt, step, 80 if prompt != "full" else None)
    run.prompt(ids(first), room=60)
    run.prompt(ids(second, seed=1))
    end = first + second
    begins = (max(0, end - window + 1) for window in (70, end + 1, 70) for head in range(3))
    assert kept(run.kv) == [[*range(begin, end)] for begin in begins]
    assert run.kv.stats().held_bytes <= run.kv.stats().full_bytes


@pytest.mark.parametrize("grows", [False, True], ids=["a prompt", "a step"])
def test_an_arena_is_gone_before_its_memory_is_given_back(
    monkeypatch: pytest.MonkeyPatch, grows: bool
) -> None:
    """What still holds it would keep the memory until the next one goes."""
    run = engine(network(), "full", "none", None)
    run.prompt(ids(40), room=4)
    old, gone = weakref.ref(run.kv._arena.columns["k"]), list[bool]()
    monkeypatch.setattr(KVCache, "_give_back", lambda kv, size: gone.append(old() is None))
    for token in ids(6 * grows):
        run.step(token)
    if not grows:
        run.prompt(ids(30, seed=2), room=4)
    assert gone == [True]


def test_rows_are_forgotten_and_whole_turns_are_not() -> None:
    run = engine(network(), "full", "none", None)
    for turn in range(3):
        run.prompt(ids(20, seed=turn))
    run.kv.cut(40)  # where a turn begins
    assert run.kv.state.turns == ((0, 20), (20, 40))
    run.prompt(ids(20, seed=2))
    run.kv.forget(45)
    assert (run.kv.position, run.kv.state.turns) == (0, ((0, 20), (20, 40)))
    assert run.kv.stats().allocated_bytes == 0
