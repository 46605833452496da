"""What is held and what a full cache would hold count the same rows in the same way;
seconds of eviction are the device's."""

from __future__ import annotations

import pytest
import torch
from pairwise import beside
from small import PAIRS, by_day, engine, ids, network

from minikv.cache import stats
from minikv.cache.kv_cache import KVCache
from minikv.cache.stats import Stopwatch, share_saved

WINDOWS = (None, (20, None, 70))
LENGTHS = (1, 5, 40, 48, 49, 60, 150)


def check(kv: KVCache) -> None:
    """The share saved is a share; without eviction and a policy's own data it is exactly 0."""
    stats = kv.stats()
    assert stats.held_bytes - stats.state_bytes <= stats.full_bytes
    less = stats.held_bytes < stats.full_bytes
    assert 0 <= stats.saved <= 1
    assert stats.saved == (1 - stats.held_bytes / stats.full_bytes if less else 0)


@pytest.mark.parametrize(
    ("prompt", "step", "windows", "length"), by_day(beside(PAIRS, WINDOWS, LENGTHS)), ids=str
)
def test_what_is_saved_is_a_share_under_every_policy(
    prompt: str, step: str, windows: tuple[int | None, ...] | None, length: int
) -> None:
    run = engine(network(windows=windows), prompt, step, 48)
    check(run.kv)
    for turn in range(2):
        run.prompt(ids(length, seed=turn))
        check(run.kv)
        for token in ids(3, seed=10 + turn):
            run.step(token)
            check(run.kv)


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_full_cache_saves_exactly_nothing(
    windows: tuple[int | None, ...] | None, length: int
) -> None:
    """After every prompt and every token of an answer, sliding windows included."""
    run = engine(network(windows=windows), "full", "none", None)
    for turn in range(2):
        run.prompt(ids(length, seed=turn))
        for token in ids(30, seed=10 + turn):
            stats = run.kv.stats()
            assert stats.held_bytes == stats.full_bytes > 0
            assert stats.saved == 0
            assert not stats.gaps
            run.step(token)


def test_a_share_is_never_below_zero() -> None:
    assert share_saved(25, 100) == 0.75
    assert share_saved(103, 100) == 0
    assert share_saved(0, 0) == 0


class Event:
    """Recorded at the time that the device says it is."""

    now = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at: float | None = None
        self.awaited = False

    def record(self, stream: object) -> None:
        self.at = Event.now

    def synchronize(self) -> None:
        self.awaited = True

    def elapsed_time(self, other: Event) -> float:
        assert other.awaited
        return 1e3 * (other.at - self.at)


def test_events_are_summed_when_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "now", 0.0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    watch = Stopwatch(torch.device("cuda"))
    for seconds in (2.0, 3.0):
        Event.now += 10.0  # the network's part
        with watch.running():
            Event.now += seconds
    assert watch.total() == pytest.approx(5.0)
    assert watch.total() == pytest.approx(5.0)
    with watch.running():
        Event.now += 1.0
    assert watch.total() == pytest.approx(6.0)


def test_a_cpu_is_looked_at_by_the_wall_and_every_prompt_begins_at_nought(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(stats.time, "perf_counter", lambda: float(next(clock)))
    net = network()
    run = engine(net, "snapkv", "none", 40)
    for turn in range(2):
        run.prompt(ids(60, turn))
        assert run.kv.state.evict_s == net.config.layers + 1  # and the end of the prompt
