"""The prompts that a turn feeds to the engine, and how the cache is restored if that fails.

`Engine.prompt` undoes one prompt. If a turn has several prompts, or replaces the content of the
cache, the old cache is kept until all of them were read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from minikv import pages
from minikv.cache.stats import Fidelity
from minikv.chat.fidelity import Measuring, recall
from minikv.engine.engine import Engine
from minikv.errors import Interrupted


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """What a turn reads.

    reuse: for the turn record. parts: the prompts, in order. anew: they are read into an empty
    cache. pinned: with `anew`, how many first positions are never evicted. recalled: the only part
    is the whole conversation, of which the tier gives the first `given` tokens. begins: the
    position at which the last turn begins, if the only part is the whole conversation. asks: the
    last part only asks about what was read before it.
    """

    reuse: str
    parts: tuple[list[int], ...]
    anew: bool
    pinned: int = 0
    recalled: bool = False
    given: int = 0
    begins: int = 0
    asks: bool = False

    @property
    def ids(self) -> list[int]:
        """The token ids of all parts."""
        return [id for part in self.parts for id in part]

    @property
    def tokens(self) -> int:
        """The number of tokens to read."""
        return self.length - self.given

    @property
    def length(self) -> int:
        """The number of tokens of all parts."""
        return sum(map(len, self.parts))

    def behind(self, seen: int) -> int:
        """How many positions come before the prompts, if the cache has seen `seen` tokens."""
        return 0 if self.anew else seen

    def fits(self, seen: int, max_context: int) -> bool:
        """Whether the prompts and one more token fit into `max_context` positions."""
        return self.behind(seen) + self.length + 1 <= max_context


@dataclass(frozen=True, slots=True)
class Read:
    """The result of reading a turn.

    seconds: wall time without `fidelity_s`. logits: of the last token, float32 [V]. evict_s:
    seconds of eviction. peak: the most bytes allocated at once. blind: a policy that scores with
    the question evicted before a question was read. lost: share of attention mass that the last
    part lost (mean, maximum, layer of the maximum), an estimate. gaps: rows had left before the
    last part, which the estimate does not include. fidelity: of a recalled prompt, if it was
    measured; fidelity_s: seconds of measuring.
    """

    seconds: float
    logits: Tensor
    evict_s: float
    peak: int
    blind: bool
    lost: tuple[float | None, float | None, int | None]
    gaps: bool
    fidelity: Fidelity | None = None
    fidelity_s: float = 0.0


def read(
    engine: Engine,
    plan: PromptPlan,
    room: int,
    progress: Callable[[int, int], None] | None,
    stopped: Callable[[], bool],
    measuring: Measuring,
) -> Read:
    """Feed the prompts of the plan. room: expected tokens of the answer. measuring: for a prompt
    that is recalled.

    Between chunks, `progress(done, total)` is called, in tokens; tokens that a policy reads twice
    count twice. Then Interrupted is raised if `stopped()`. After any error, the cache is as it was
    before. Otherwise the caller calls `KVCache.forget_mark` once it has noted what was read.
    """
    began = perf_counter()
    kv, done, evict_s, peak, blind = engine.kv, 0, 0.0, 0, False
    coming, work = sum(map(len, plan.parts)), 0  # tokens of the parts after this one, and of it
    replaces = plan.anew and kv.position > 0
    fidelity, fidelity_s = None, 0.0

    def between_chunks(so_far: int, of: int) -> None:
        nonlocal work
        # This may differ from the part's length: a recall also feeds tokens that the policies
        # observe, and some prompts are read twice.
        work = of
        whole = done + of + coming
        if stopped():
            raise Interrupted(
                f"stopped reading at {done + so_far:,} of {whole:,} tokens",
                "the chat is as it was" if replaces else "nothing was added",
            )
        if progress is not None:
            progress(done + so_far, whole)

    gaps = not plan.anew and kv.stats().gaps
    mark = kv.mark()
    try:
        if replaces and not plan.recalled:
            engine.reset()
        if plan.anew and plan.pinned:
            kv.pin(plan.pinned)
        for part in plan.parts:
            last = part is plan.parts[-1]
            coming -= len(part)
            gaps = gaps or (done > 0 and kv.stats().gaps)
            if plan.recalled:
                found = recall(engine, part, between_chunks, room, measuring, plan.begins)
                logits, figures = found.logits, found.figures
                fidelity, fidelity_s = found.fidelity, found.seconds
            else:
                asks = plan.asks and last
                turn = max(1, len(part) - plan.begins) if plan.begins else None
                logits = engine.prompt(part, between_chunks, room if last else 1, asks, turn)
                figures = kv.last_prompt
            # Until the last prompt was read, the old cache is kept, in case of an error.
            anew = replaces and not plan.recalled  # a recall counts the old rows itself
            tries = fidelity is not None and (fidelity.tried or 1) > 1
            kept = mark.arena.nbytes if anew or done or tries else 0
            done += max(work, len(part))
            evict_s, peak = evict_s + figures.evict_s, max(peak, figures.peak_bytes + kept)
            blind = blind or (figures.shaped and not last)
    except BaseException:
        kv.go_back(mark)
        raise
    pages.give_back()
    lost = figures.lost_mean, figures.lost_max, figures.lost_layer
    seconds = perf_counter() - began - fidelity_s
    return Read(seconds, logits, evict_s, peak, blind, lost, gaps, fidelity, fidelity_s)
