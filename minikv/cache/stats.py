"""What the cache must know about a network (`Shape`), the figures that it reports, and the
stopwatch that measures eviction."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the figures are shown by commands that start without torch
    import torch

POSITION_BYTES = 4
"""A row's position, an int32."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a network. heads: query heads, H * G. windows[i]: layer i's sliding window in
    tokens, or None. max_context: tokens."""

    layers: int
    kv_heads: int
    heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    max_context: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The present figures of the cache, counted from its tensors. Rows are per (layer, KV head),
    bytes are totals.

    seen: tokens.
    row_bytes: k and v of one row.
    kept_*: rows held.
    full_bytes: `full_cache_bytes` of the tokens seen.
    held_bytes: all columns of the rows held. state_bytes: the part of it for the policies' columns.
    allocated_bytes: everything allocated between turns.
    peak_bytes: the most allocated at once during the last prompt, with the staging buffer and both
        arenas.
    evicted: tokens seen minus kept_mean.
    shaped: the last prompt's question decided which rows stayed.
    gaps: the heads hold fewer rows than in a cache without eviction.
    """

    seen: int
    row_bytes: int
    kept_mean: float
    kept_min: int
    kept_max: int
    full_bytes: int
    held_bytes: int
    allocated_bytes: int
    peak_bytes: int
    state_bytes: int
    evicted: int
    shaped: bool
    gaps: bool

    @property
    def saved(self) -> float:
        """See `share_saved`."""
        return share_saved(self.held_bytes, self.full_bytes)


def full_cache_rows(shape: Shape, tokens: int) -> int:
    """Rows that a cache without eviction holds after `tokens` tokens, over all layers and heads:
    those that the next token can see."""
    rows = sum(tokens if w is None else min(tokens, w - 1) for w in shape.windows)
    return rows * shape.kv_heads


def full_cache_bytes(shape: Shape, tokens: int, itemsize: int) -> int:
    """Bytes of these rows: a key and a value, of `itemsize` bytes per number, and a position."""
    row = 2 * shape.head_dim * itemsize + POSITION_BYTES
    return full_cache_rows(shape, tokens) * row


def share_saved(held: int, full: int) -> float:
    """The share of a full cache's bytes that is saved, from 0 to 1.

    The policies' columns count as held. If few rows are evicted, these columns can take more than
    eviction has freed; then the share is 0.
    """
    return max(0.0, 1.0 - held / full) if full else 0.0


@dataclass(frozen=True, slots=True)
class Fidelity:
    """What eviction lost from a prompt that was read from a tier, see `minikv.cache.fidelity`.
    None: not measured.

    kl_first_token: KL(full || hot) of the first token of the answer, in nats. output_error_*:
    relative error of the attention output for the last token, over the layers.
    """

    kl_first_token: float | None = None
    output_error_mean: float | None = None
    output_error_max: float | None = None
    output_error_layer: int | None = None


class Stopwatch:
    """Sums the seconds spent inside `running`. On CUDA it measures with events, so only `total`
    waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._parts: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the work that is started inside this context."""
        if self._device.type == "cuda":
            import torch

            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
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
