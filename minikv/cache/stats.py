"""What the cache must know of a network, and what it tells about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a network. windows[i] is layer i's sliding window in tokens, or None."""

    layers: int
    kv_heads: int
    heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    max_context: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The cache right now, counted from its tensors. Rows per (layer, KV head), bytes over all.

    row_bytes: k and v of one row. full_bytes: k and v of every token seen, as a cache without
    eviction would hold them (sliding windows respected). held_bytes: every column of the rows
    held; state_bytes: the part of it that is the policy's own. allocated_bytes: all that is
    allocated between turns. peak_bytes: the most allocated at once during the last prompt, staging
    and backup included. evicted: tokens seen less the mean of those held. lost_*: share of the
    observation queries' attention that fell on evicted rows at the last eviction by a policy
    that observes (an estimate; None without evidence). shaped: the last prompt's question
    decided what stayed. gaps: some head lacks a row that a cache without eviction would hold.
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
    lost_mean: float | None
    lost_max: float | None
    lost_layer: int | None
    evict_s: float
    budget_rows: int | None
    shaped: bool
    gaps: bool


@dataclass(frozen=True, slots=True)
class PromptFigures:
    """What the last prompt cost: seconds of eviction, the most bytes allocated at once, whether its
    question decided what stayed, and the loss as `CacheStats` has it."""

    evict_s: float
    peak_bytes: int
    shaped: bool
    lost_mean: float | None
    lost_max: float | None
    lost_layer: int | None
