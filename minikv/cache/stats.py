"""What the cache must know of a network, and what it tells about itself."""

from __future__ import annotations

from dataclasses import dataclass

POSITION_BYTES = 4
"""A row's position, an int32."""


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

    row_bytes: k and v of one row. full_bytes: k, v and pos of every row that this cache would
    hold of the tokens seen if nothing were evicted, see `full_cache_bytes`. held_bytes: every
    column of the rows held; state_bytes: the part of it that is the policy's own. allocated_bytes:
    all that is allocated between turns. peak_bytes: the most allocated at once during the last
    prompt, staging and backup included. evicted: tokens seen less the mean of those held. lost_*:
    share of the observation queries' attention that fell on evicted rows at the last eviction by a
    policy that observes (an estimate; None without evidence). shaped: the last prompt's question
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

    @property
    def saved(self) -> float:
        """See `share_saved`."""
        return share_saved(self.held_bytes, self.full_bytes)


def full_cache_rows(shape: Shape, tokens: int) -> int:
    """Rows that a cache without eviction holds after `tokens` tokens: those that the next token can
    see."""
    rows = sum(tokens if w is None else min(tokens, w - 1) for w in shape.windows)
    return rows * shape.kv_heads


def full_cache_bytes(shape: Shape, tokens: int, itemsize: int) -> int:
    """What these rows take: a key and a value in numbers of `itemsize` bytes, and a position."""
    row = 2 * shape.head_dim * itemsize + POSITION_BYTES
    return full_cache_rows(shape, tokens) * row


def share_saved(held: int, full: int) -> float:
    """The share of a full cache that is not held, from 0 to 1.

    What the policy stores counts as held. While little was evicted, it can be more than what was
    freed: then nothing is saved yet, and the share is 0.
    """
    return max(0.0, 1.0 - held / full) if full else 0.0


@dataclass(frozen=True, slots=True)
class Fidelity:
    """What the rows under the budget lose of a prompt that was read from a tier, see
    `minikv.cache.fidelity`; None where it was not measured.

    kl_first_token: KL(full || hot) of the first token of the answer, in nats. output_error_*: of
    the attention's output for the last token, relative, by layer. Where the budget was chosen by
    `--quality`: bound, the nats that it allows; budget, the tokens per head that were taken; tried,
    how many budgets.
    """

    kl_first_token: float | None = None
    output_error_mean: float | None = None
    output_error_max: float | None = None
    output_error_layer: int | None = None
    bound: float | None = None
    budget: int | None = None
    tried: int | None = None

    @property
    def bounded(self) -> bool:
        """Whether the bound was met."""
        return (
            self.bound is not None
            and self.kl_first_token is not None
            and self.kl_first_token <= self.bound
        )


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
