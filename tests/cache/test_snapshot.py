"""A restored snapshot is bit for bit the cache that was never set aside."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from refusals import failing, refused
from small import PAIRS, by_day, engine, ids, network
from torch import Tensor
from views import kept

from minikv.cache.budget import Budget
from minikv.cache.kv_cache import KVCache
from minikv.cache.rules import Rules
from minikv.cache.snapshot import CacheSnapshot
from minikv.cache.stats import CacheStats
from minikv.chat.eviction_config import EvictionConfig
from minikv.engine.engine import Engine

Trace = list[Tensor]


def go_on(run: Engine, seed: int) -> Trace:
    """Logits of every forward, and after each what every head holds."""
    trace: Trace = []

    def note(logits: Tensor) -> None:
        trace.extend((logits, *map(torch.tensor, kept(run.kv))))

    for turn in range(2):
        note(run.prompt(ids(21 - 10 * turn, seed=seed + turn)))
        for token in ids(5 - 3 * turn, seed=seed + 100 + turn):
            note(run.step(token))
    return trace


def same(one: Trace, two: Trace) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def put_back(kv: KVCache, held: CacheSnapshot) -> None:
    kv.restore(held, kv.rules)


def between_steps(stats: CacheStats) -> CacheStats:
    """Without what the first step after a change of the layout makes for itself."""
    return replace(stats, allocated_bytes=0)


@pytest.mark.parametrize(("prompt", "step"), by_day(PAIRS))
def test_what_follows_is_bit_identical(prompt: str, step: str) -> None:
    """In the middle of an answer, in this cache, and, out of a file, in another; one layer has a
    sliding window. And before anything was read."""
    net = network(layers=2, heads=4, kv_heads=2, windows=(20, None))
    run, other = (engine(net, prompt, step, 48) for _ in range(2))
    empty = run.kv.snapshot()
    run.prompt(ids(70))
    for token in ids(4, seed=1):
        run.step(token)
    held, stats = run.kv.snapshot(), run.kv.stats()
    want = go_on(run, 5)
    put_back(run.kv, held)
    assert between_steps(run.kv.stats()) == between_steps(stats)
    assert same(go_on(run, 5), want)
    put_back(other.kv, through_json(held))
    assert between_steps(other.kv.stats()) == between_steps(stats)
    assert same(go_on(other, 5), want)
    put_back(other.kv, empty)
    assert other.kv.stats().held_bytes == 0


def test_a_budget_in_blocks_or_as_a_share_or_pinned_goes_on_too() -> None:
    net = network()
    strided = EvictionConfig.read("roco", budget=48, stride=8).rules()
    shared = EvictionConfig.read("adakv", budget="40%").rules()
    for rules, pinned in ((strided, 0), (shared, 0), (shared, 6)):
        runs = [engine(net, "full", "none", None) for _ in range(2)]
        for run in runs:
            run.kv.configure(rules)
        run, other = runs
        run.kv.pin(pinned)
        run.prompt(ids(120))
        for token in ids(5):
            run.step(token)
        held = run.kv.snapshot()
        want = go_on(run, 3)
        other.kv.restore(held, rules)
        assert other.kv.state.rows == run.kv.state.rows
        assert same(go_on(other, 3), want)


def test_a_cache_goes_on_under_other_policies_as_if_they_were_set_after_it() -> None:
    """`under`; and where those are refused nothing changes."""
    net = network()
    run, other = (engine(net, "adakv", "roco", 48) for _ in range(2))
    run.prompt(ids(90))
    run.step(3)
    held = run.kv.snapshot()
    then = run.kv.rules
    later = EvictionConfig.read("h2o", budget=30).rules()
    run.kv.configure(later)
    want = go_on(run, 5)
    other.kv.restore(held, then, under=later)
    assert other.kv.rules.prompt is later.prompt
    assert same(go_on(other, 5), want)
    before = other.kv.snapshot()
    small = replace(later, budget=Budget.parse(1))
    refused("too small", other.kv.restore, held, then, under=small)
    assert other.kv.position == before.state.position
    assert other.kv.rules.prompt is later.prompt


def test_only_rows_in_use_are_copied_and_never_shared() -> None:
    run = engine(network(), "adakv", "roco", 48)
    run.prompt(ids(400))
    held = run.kv.snapshot()
    stats = run.kv.stats()
    assert held.nbytes == stats.held_bytes == 9 * 48 * run.kv.arena.row_nbytes()
    before = {name: column.clone() for name, column in held.columns.items()}
    layout = copy.deepcopy(held.layout)
    put_back(run.kv, held)
    go_on(run, 1)
    assert all(torch.equal(column, before[name]) for name, column in held.columns.items())
    assert torch.equal(held.layout.length, layout.length)
    assert torch.equal(held.layout.free_slot, layout.free_slot)


def test_no_memory_for_the_old_cache_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    net = network()
    run, twin = (engine(net, "adakv", "roco", 48) for _ in range(2))
    for each in (run, twin):
        each.prompt(ids(90))
    held = run.kv.snapshot()
    for each in (run, twin):
        each.prompt(ids(30, seed=1))

    with monkeypatch.context() as patch:
        patch.setattr("minikv.cache.arena.Arena._blank", failing(MemoryError()))
        with pytest.raises(MemoryError):
            put_back(run.kv, held)
    assert same(go_on(run, 5), go_on(twin, 5))


def test_a_restart_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the last step can not be finished: the policies are still those of the rows."""
    run = engine(network(), "adakv", "roco", 40)
    run.prompt(ids(50))
    kv = run.kv
    before = (kv.rules, kv.position)
    with monkeypatch.context() as short:
        short.setattr(kv, "settle", failing(MemoryError()))
        for rules in ([Rules()], []):
            with pytest.raises(MemoryError):
                kv.reset(*rules)
    assert (kv.rules, kv.position) == before
    kv.reset(Rules())
    assert (kv.rules.prompt, kv.position) == (None, 0)


def test_a_cache_of_another_network_or_policy_is_not_taken() -> None:
    held = engine(network(), "adakv", "roco", 48).kv.snapshot()
    for other in (
        engine(network(layers=2), "adakv", "roco", 48),
        engine(network(), "adakv", "tova", 48),
        engine(network(heads=4, kv_heads=2), "adakv", "roco", 48),
        engine(network(head_dim=4), "adakv", "roco", 48),
    ):
        other.prompt(ids(90))
        stats = other.kv.stats()
        with pytest.raises(ValueError, match="belongs to another network"):
            put_back(other.kv, held)
        assert other.kv.stats() == stats
        assert other.step(3).isfinite().all()


def test_a_cache_that_claims_more_room_than_any_has_is_not_taken() -> None:
    """A forged file must not choose how much memory is asked for."""
    run = engine(network(), "adakv", "roco", 48)
    run.prompt(ids(90))
    held = run.kv.snapshot()
    with pytest.raises(ValueError, match="belongs to another network"):
        put_back(run.kv, replace(held, region=(*held.region[:-1], 1 << 40)))
    put_back(run.kv, held)


def through_json(held: CacheSnapshot) -> CacheSnapshot:
    return CacheSnapshot.read(json.loads(json.dumps(held.record())), held.columns)


@pytest.fixture
def held() -> CacheSnapshot:
    run = engine(network(), "adakv", "roco", 48)
    run.prompt(ids(90))
    return run.kv.snapshot()


# Of each key, "length.0.1" for one in a table, what no cache says. Nothing else bounds a peak; a
# capacity may have more than 64 bits, or be negative when it is added to the start.
FORGED: dict[str, list[object]] = {
    **{"position": [-1, 2.5, True, 1 << 70], "peak": [1 << 62, -1, "much"], "pinned": [None]},
    **{"turns": [3, [[0]], [[0, "a"]]], "rows": ["48"], "evict_s": ["1"], "shaped": [None]},
    **{"lost": [{"0": 1}, ["x"]], "region": [[], [0, 5]], "region.1": [10**9], "region.2": [0]},
    **{"start": ["abc", [[0.5]]], "start.0.0": [-3], "start.1.0": [0], "length": [[[[1]]]]},
    **{"length.0.1": [-1, 10**6, 1], "cap.0.0": [2**41, -1], "capacity": [[[1]]], "hole": [None]},
    **{"capacity.0.0": [10**6, 2**63, 2**64], "capacity.1.0": [2**63 - 5]},
    "hole.0.0": [10**6, -2],
}


@pytest.mark.parametrize(
    ("key", "value"),
    [pytest.param(key, one, id=f"{key}={one}") for key, some in FORGED.items() for one in some],
)
def test_a_record_that_no_cache_wrote_is_refused(
    held: CacheSnapshot, key: str, value: object
) -> None:
    table = record = json.loads(json.dumps(held.record()))
    CacheSnapshot.read(record, held.columns)
    *path, last = [int(step) if step.isdigit() else step for step in key.split(".")]
    for step in path:
        table = table[step]
    table[last] = value
    with pytest.raises((ValueError, TypeError)):
        CacheSnapshot.read(record, held.columns)


def test_a_record_that_does_not_fit_its_rows_is_refused(held: CacheSnapshot) -> None:
    """Also where a key is missing. A cache without positions has none to check."""

    def stays_out(
        says: str, record: Any, columns: dict[str, Tensor], error: Any = ValueError
    ) -> None:
        with pytest.raises(error, match=says):
            CacheSnapshot.read(record, columns)

    record, others = json.loads(json.dumps(held.record())), dict(held.columns)
    pos = others.pop("pos")
    assert CacheSnapshot.read(record, others).columns.keys() == others.keys()
    for wrong in (-1, 90, 2**31 - 1):
        places = pos.clone()
        places[7] = wrong
        stays_out("was not read", record, {**others, "pos": places})
    stays_out("every row", record, {**others, "pos": pos[1:]})
    for key in record:
        less = {name: value for name, value in record.items() if name != key}
        stays_out(None, less, held.columns, KeyError)
    # As many rows in all, but of two heads one has more than its capacity.
    one, more = record["length"][0], record["capacity"][0][0] - record["length"][0][0] + 1
    one[0], one[1] = one[0] + more, one[1] - more
    stays_out("outside its segment", record, held.columns)
