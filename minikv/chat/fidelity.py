"""A prompt recalled from the tier, what its rows lose, and the smallest budget that loses little.

With a bound, budgets are tried from the smallest one of use, each twice the one before, up to the
user's. The first to lose no more than the bound is taken; where none does, the user's. All but the
first try find everything in the tier. What is tried and taken depends on the tokens alone, so the
same chat gets the same answers. Without memory to measure, nothing is taken: that is an error.
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
    """What is measured of a recalled prompt: nothing unless `wanted` or `bound`, the nats that the
    first token of the answer may lose; 0 is no bound. vocab: logits that count."""

    vocab: int
    wanted: bool = True
    bound: float = 0.0


@dataclass(frozen=True, slots=True)
class Recalled:
    """logits: of the last token. figures: of the pass that was taken, its seconds of eviction and
    its peak those of all. fidelity: None if it was not to be measured; seconds: that it took."""

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
    """Read the whole conversation, with what the tier has of it, as `Engine.recall`; and measure.
    begins: the position at which the last turn begins.

    After an error in a later try, the cache has the prompt under the budget before that one.
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
