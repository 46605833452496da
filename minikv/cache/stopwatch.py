"""Measures how long a device works on something that is done in several parts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Sums the seconds spent inside `running`. On CUDA it measures with events, so only `total`
    waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._parts: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Work that is started inside this context counts."""
        if self._device.type == "cuda":
            begin, end = _event(), _event()
            begin.record(torch.cuda.current_stream(self._device))
            yield
            end.record(torch.cuda.current_stream(self._device))
            self._parts.append((begin, end))
            return
        began = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - began

    def total(self) -> float:
        """The sum so far. Waits for the device."""
        for begin, end in self._parts:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1e3
        self._parts.clear()
        return self._seconds


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
