"""Seconds that eviction takes are the device's, not those of asking it."""

from __future__ import annotations

import pytest
import small
import torch

from minikv.cache import stopwatch
from minikv.cache.stopwatch import Stopwatch


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
        assert self.at is not None
        assert other.at is not None
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
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: float(next(clock)))
    net = small.network()
    engine = small.engine(net, "snapkv", "none", 40)
    for turn in range(2):
        engine.prompt(small.ids(60, turn))
        assert engine.kv.stats().evict_s == net.config.layers + 1  # and the end of the prompt
