"""What a turn feeds to the engine, and the way back when that fails.

A prompt undoes itself (see `Engine.prompt`). Where a turn is read as several, or in the place of
what is in the cache, a copy of the cache on the host is the way back.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from minikv.errors import Interrupted

if TYPE_CHECKING:
    from minikv.cache.snapshot import CacheSnapshot
    from minikv.chat.eviction_config import EvictionConfig
    from minikv.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """What a turn reads: `parts`, one prompt after the other, in an empty cache if it is `anew`.

    `reuse` is what this makes of the turn: refresh, once or blind. `pinned`: first positions of a
    cache that begins anew that never leave.
    """

    reuse: str
    parts: tuple[list[int], ...]
    anew: bool
    pinned: int = 0

    @property
    def ids(self) -> list[int]:
        """All of it."""
        return [id for part in self.parts for id in part]

    @property
    def tokens(self) -> int:
        """How many that are."""
        return sum(map(len, self.parts))


@dataclass(frozen=True, slots=True)
class Read:
    """What reading a turn left: logits of the last token, float32 [V], seconds of eviction and the
    most bytes at once. blind: a policy that scores with questions chose before one came. lost: the
    estimate (mean, most, its layer) of the part that lost most."""

    logits: Tensor
    evict_s: float
    peak: int
    blind: bool
    lost: tuple[float | None, float | None, int | None]


def read(
    engine: Engine,
    eviction: EvictionConfig,
    feed: PromptPlan,
    held: CacheSnapshot | None,
    room: int,
    progress: Callable[[int, int], None] | None,
    stopped: Callable[[], bool],
) -> Read:
    """Feed it. `choice`: the engine's policies; `held`: a copy of its cache, if there is one.

    Between chunks `progress(done, total)` is told, and Interrupted raised once `stopped()`. After
    any error the cache is as it was before, or empty if there is no memory for that any more.
    """
    kv, total, done, evict_s, peak, blind = engine.kv, feed.tokens, 0, 0.0, 0, False
    replaces = feed.anew and kv.position > 0

    def between_chunks(so_far: int, _: int) -> None:
        if stopped():
            raise Interrupted(
                f"stopped reading at {done + so_far:,} of {total:,} tokens",
                "the chat is as it was" if replaces else "nothing was added",
            )
        if progress is not None:
            progress(done + so_far, total)

    lost: tuple[float | None, float | None, int | None] = (None, None, None)
    copied = replaces or len(feed.parts) > 1
    if copied and held is None:
        held = kv.snapshot()
    try:
        if replaces:
            engine.reset()
        if feed.anew and feed.pinned:
            kv.pin(feed.pinned)
        for part in feed.parts:
            last = done + len(part) == total
            logits = engine.prompt(part, between_chunks, room if last else 1)
            stats = kv.stats()
            done += len(part)
            evict_s, peak = evict_s + stats.evict_s, max(peak, stats.peak_bytes)
            blind = blind or (stats.shaped and not last)
            if (stats.lost_mean or 0.0) >= (lost[0] or 0.0):
                lost = stats.lost_mean, stats.lost_max, stats.lost_layer
    except BaseException as error:
        if copied and held is not None:
            _put_back(engine, eviction, held, error)
        raise
    if copied and held is not None and kv.arena.device.type == "cpu":
        peak += held.nbytes  # it lay in the same memory
    return Read(logits, evict_s, peak, blind, lost)


def _put_back(
    engine: Engine, eviction: EvictionConfig, held: CacheSnapshot, error: BaseException
) -> None:
    traceback.clear_frames(error.__traceback__)  # their locals keep the memory of the reading
    engine.reset()
    try:
        engine.kv.restore(held, *eviction.policies())
    except (MemoryError, RuntimeError):
        engine.reset()
