"""What fits into memory: `budget="auto"`, and the figures of `minikv plan`.

The figures for the cache come from the engine itself: a real `KVCache` begins the prompt on torch's
meta device, where tensors have sizes but no memory. What is allocated only while a prompt is read,
is computed here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from minikv.cache.kv_cache import KVCache
from minikv.cache.rules import Rules
from minikv.cache.stats import Shape
from minikv.cache.tier_rows import row_nbytes
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.report import size
from minikv.errors import ContextError, UsageError
from minikv.policies.base import ALL, largest_block
from minikv.policies.repeats import Wording

USEFUL = 512
"""`budget="auto"` takes no fewer tokens per head: they would save little beside what reading
takes."""
_REQUEST = (0,) * 32
"""The most tokens that a template or a tokenizer may need for a request to repeat a text."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What decides how much fits beside the weights.

    dtype: of the network. kv: of stored keys and values. work(tokens): bytes that the network needs
    to read so many tokens. beside(tokens): bytes of a tier in the cache's own memory.
    """

    shape: Shape
    dtype: torch.dtype
    kv: torch.dtype
    work: Callable[[int], int]
    beside: Callable[[int], int] = lambda tokens: 0

    def needs(self, eviction: EvictionConfig, tokens: int, answer: int) -> tuple[int, int] | None:
        """Bytes beside the weights for a first prompt of `tokens` tokens and an answer, and for a
        later question, which is read into another arena, beside the rows of the one before. None
        if the policies cannot work so. Without eviction there is no tier."""
        try:
            kv = begun(eviction.rules(), self.shape, self.dtype, self.kv, tokens, answer)
        except (UsageError, ContextError):
            return None
        assert kv.target is not None
        twice = kv.scored_twice
        reading = peak(kv, tokens)
        if twice is not None:
            reading = twice.planned(twice.cost(gpu=False).file_ram)
        first = max(reading, kv.target.nbytes) + self.tier(kv, tokens) + self.work(tokens)
        return first, first + kv.target.nbytes

    def tier(self, kv: KVCache, tokens: int) -> int:
        """Bytes of a tier of `tokens` tokens beside the rows of this cache, in its own memory."""
        recalls = kv.rules.evicts and kv.rules.cannot_recall is None
        return self.beside(tokens) if recalls else 0

    def rows(
        self,
        eviction: EvictionConfig,
        tokens: int,
        answer: int,
        free: int | None,
        held: int = 0,
    ) -> int:
        """The rows per head of `budget="auto"` for a conversation of `tokens` tokens and an answer:
        0 if all fit into `free` bytes (None: not known) with an eighth of them to spare, else as
        many as do, at least `USEFUL` or what the policies need. Two digits, so that a little more
        free memory changes nothing. held: bytes that the cache has now, which are freed once the
        prompt is read."""
        if free is None or not eviction.may_evict:
            return 0

        def fits(rows: int) -> bool:
            needs = self.needs(eviction.under(rows), tokens, answer)
            return (
                needs is not None and needs[0] <= usable(free) and needs[1] <= usable(free + held)
            )

        if fits(0):
            return 0
        least = max(USEFUL, eviction.least_rows())
        digits = range(len(str(least)) - 2, len(str(tokens)))
        steps = [first * 10**zeros for zeros in digits for first in range(10, 100)]
        steps = [rows for rows in steps if least < rows < tokens]
        low, high = 0, len(steps)  # steps before `low` fit, those from `high` on do not
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if fits(steps[middle]) else (low, middle)
        return steps[low - 1] if low else least


def usable(free: int) -> int:
    """The part of the free bytes beside the weights that a chat plans with."""
    return free - free // 8


def too_much(nbytes: int, free: int | None) -> str:
    """Why host memory has no room for `nbytes` bytes; "" if it has. free: free bytes, None if not
    known."""
    if free is None or nbytes <= usable(free):
        return ""
    return f"that takes {size(nbytes)} of RAM, and {size(free)} are free"


def fit_words(rows: int, tokens: int) -> str:
    """What `Machine.rows` found for `tokens` tokens, in words."""
    if not rows:
        return "all of it fits: nothing is evicted"
    most = "no more than " if rows <= USEFUL else ""
    return f"{most}{rows:,} tokens per head fit: {100 * rows // max(tokens, 1)}% of what is read"


def tier_beside(
    shape: Shape, dtype: torch.dtype, tokens: int, tier: str, tier_dtype: str, *, cuda: bool
) -> int:
    """Bytes that a tier of `tokens` tokens adds to the cache's own memory. tier and tier_dtype: as
    `Settings` has them. A prompt is staged in the tier itself, unless that is int8."""
    if tier != "ram" or cuda:
        return 0
    coded = tier_dtype == "int8"
    whole = tokens * row_nbytes(shape, dtype, coded)
    return whole if coded else whole - whole // shape.layers


def begun(
    rules: Rules, shape: Shape, dtype: torch.dtype, kv: torch.dtype, tokens: int, answer: int
) -> KVCache:
    """The engine's cache at the beginning of a first prompt, without memory. Raises UsageError and
    ContextError."""
    made = KVCache(shape, rules, dtype=dtype, device="meta", kv=None if kv == dtype else kv)
    made.words = Wording(_REQUEST, _REQUEST, _REQUEST)
    made.begin(tokens, min(answer, max(1, shape.max_context - tokens)))
    return made


def visible(tokens: int, window: int | None) -> int:
    """Rows of a head that the next token could still see."""
    return tokens if window is None else min(tokens, window - 1)


def peak(kv: KVCache, tokens: int) -> int:
    """Bytes of KV cache that exist at once while the prompt is read, as the turn record counts."""
    shape, arena, prompt, step = kv.shape, kv.target, kv.rules.prompt, kv.rules.step
    assert arena is not None
    if (twice := kv.scored_twice) is not None:
        return twice.planned(twice.cost(gpu=False).ram)
    state = arena.row_nbytes(arena.extra)
    heads, reading = shape.kv_heads, kv.first
    if kv.rules.stride:
        # One layer at cap + stride rows, whose positions are counted in 64 bits.
        rows = kv.budget_rows
        assert rows is not None
        wide = 2 * shape.head_dim * kv.dtype.itemsize + 8 + state
        return arena.nbytes + heads * (rows + kv.rules.stride) * wide
    assert reading is not None
    plan, totals = reading.plan, reading.plan.totals
    evicts = totals is not None and any(
        heads * visible(tokens, window) > total
        for window, total in zip(shape.windows, totals, strict=True)
    )
    evicts = evicts or (plan.pool is not None and plan.evicts(0))
    handed = step.observe if step is not None else 0
    observed = (prompt.evidence.observe if prompt is not None else 0) or handed
    mass = scratch = 0
    if observed and (observed == ALL or evicts or handed):
        mass = scratch = 4 * heads * tokens * (shape.heads // heads + 1)  # and squares, float32
        if observed != ALL:
            scratch += heads * tokens * state
    if prompt is not None and evicts and prompt.evidence.each_query:
        each = (shape.heads // heads) * min(tokens, observed) * tokens
        scratch += 4 * largest_block(heads, each, kv.ops.block)
    block = 4 * largest_block(heads, tokens * shape.head_dim, kv.ops.block)
    if prompt is not None and evicts and prompt.evidence.vectors:
        scratch = max(scratch, mass + heads * tokens * state + 2 * block)
    codes = 2 * heads * tokens * (shape.head_dim + 4) if arena.coded else 0  # with their scales
    if codes and plan.pool is None:
        scratch = max(scratch, (mass if observed == ALL else 0) + codes + block)
    told = 4 * tokens if reading.foresees else 0
    if plan.pool is not None:
        entering = min(plan.pool, heads * tokens) * shape.head_dim * kv.kv.itemsize
        entering = codes + max(entering, block if codes else 0)
        largest = max(column.nbytes for column in arena.columns.values())
        # While rows enter the pool and are put in order, the last layer's mass is there.
        scratch = max(scratch, mass + entering, mass + largest)
    return reading.peak + told + scratch
