"""What a turn feeds to the engine, and how the cache goes back if that fails.

`Engine.prompt` undoes one prompt. If a turn has several prompts, or replaces what is in the cache,
the old cache is kept until all of them were read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from minikv.cache.stats import Fidelity
from minikv.chat.fidelity import Measuring, recall
from minikv.engine.engine import Engine
from minikv.errors import Interrupted


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """What a turn reads.

    parts: the prompts, in order. anew: they are read into an empty cache. reuse: what the turn
    record says. pinned: with `anew`, how many first positions never leave. recalled: the one part
    is the whole conversation, of which the tier gives the first `given` tokens. begins: the
    position at which the last turn begins, where the one part is the whole conversation. asks: the
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
        """How many positions come before it, where the cache has seen so many tokens."""
        return 0 if self.anew else seen

    def fits(self, seen: int, max_context: int) -> bool:
        """Whether it and one more token fit `max_context` positions."""
        return self.behind(seen) + self.length + 1 <= max_context


@dataclass(frozen=True, slots=True)
class Read:
    """The result of reading a turn.

    seconds: wall time, but for `fidelity_s`. logits: of the last token, float32 [V]. evict_s:
    seconds of eviction. peak: the most bytes at once. blind: a policy that scores with the question
    evicted before a question was read. lost: estimated attention lost (mean, maximum, layer of the
    maximum) by the last part. gaps: rows had left before it, which the estimate does not see.
    fidelity: of a prompt that was recalled, if it was to be measured; fidelity_s: seconds of that.
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
    """Feed the prompts of the plan. room: expected tokens of the answer. measuring: of a prompt
    that is recalled.

    Between chunks, `progress(done, total)` is called, where what a policy reads twice counts twice,
    and Interrupted is raised if `stopped()`.
    After any error, the cache is as it was before.
    """
    began = perf_counter()
    kv, done, evict_s, peak, blind = engine.kv, 0, 0.0, 0, False
    coming, work = sum(map(len, plan.parts)), 0  # tokens of the parts to come, and of this one
    replaces = plan.anew and kv.position > 0
    fidelity, fidelity_s = None, 0.0

    def between_chunks(so_far: int, of: int) -> None:
        nonlocal work
        # A recalled question is fed with the tokens before it that score it, and some prompts are
        # read twice.
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
    before = kv.mark()
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
            # What an error goes back to is kept until the last prompt was read.
            anew = replaces and not plan.recalled  # which counts the old rows itself
            tries = fidelity is not None and (fidelity.tried or 1) > 1
            kept = before.arena.nbytes if anew or done or tries else 0
            done += max(work, len(part))
            evict_s, peak = evict_s + figures.evict_s, max(peak, figures.peak_bytes + kept)
            blind = blind or (figures.shaped and not last)
    except BaseException:
        kv.go_back(before)
        raise
    kv.forget_mark()
    lost = figures.lost_mean, figures.lost_max, figures.lost_layer
    seconds = perf_counter() - began - fidelity_s
    return Read(seconds, logits, evict_s, peak, blind, lost, gaps, fidelity, fidelity_s)
