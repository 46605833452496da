"""Recalls a prompt from the tier, measures what eviction loses, and finds the smallest budget that
loses little.

With a bound, budgets are tried from the smallest with which the policies work, each twice the one
before, up to the user's. The first that loses no more than the bound is used; if none does, the
user's. All tries but the first find the whole prompt in the tier. The result depends only on the
tokens, so the same chat gets the same answers. If there is no memory to measure, that is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from torch import Tensor

from minikv.cache.stats import Fidelity, PromptFigures
from minikv.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Measuring:
    """Whether to measure what a recalled prompt loses. bound: how many nats the first token of the
    answer may lose; 0: no bound. wanted: measure also without a bound. vocab: how many logits
    count."""

    vocab: int
    wanted: bool = True
    bound: float = 0.0


@dataclass(frozen=True, slots=True)
class Recalled:
    """The result of `recall`. logits: of the last token. figures: of the pass that was used, but
    with the seconds of eviction summed over all passes and their highest peak. fidelity: None if it
    was not measured. seconds: time of measuring."""

    logits: Tensor
    figures: PromptFigures
    fidelity: Fidelity | None
    seconds: float


def recall(
    engine: Engine,
    ids: Sequence[int],
    progress: Callable[[int, int], None] | None,
    room: int,
    measuring: Measuring,
    begins: int,
) -> Recalled:
    """Read the whole conversation with `Engine.recall`, and measure what it loses. begins: the
    position at which the last turn begins. Raises as `Engine.recall`.

    After an error in a later try, the cache has the prompt under the budget that was tried before.
    """
    kv, bound = engine.kv, measuring.bound
    if not bound:
        logits = engine.recall(ids, progress, room, None, begins)
        began, found = perf_counter(), None
        if measuring.wanted:
            try:
                found = engine.fidelity(ids[-1], logits, measuring.vocab)
            except (MemoryError, RuntimeError):  # the answer does not depend on it
                found = Fidelity()
        return Recalled(logits, kv.last_prompt, found, perf_counter() - began)
    evict_s, peak, seconds = 0.0, 0, 0.0
    for tried, rows in enumerate(kv.budgets(len(ids)), 1):
        logits = engine.recall(ids, progress, room, rows, begins)
        figures = kv.last_prompt
        evict_s, peak = evict_s + figures.evict_s, max(peak, figures.peak_bytes)
        began = perf_counter()
        found = engine.fidelity(ids[-1], logits, measuring.vocab)
        seconds += perf_counter() - began
        found = replace(found, bound=bound, budget=rows, tried=tried)
        if found.bounded:
            break
    return Recalled(logits, replace(figures, evict_s=evict_s, peak_bytes=peak), found, seconds)
