"""Reads the planned prompts, or others if reading is stopped or the tier fails.

A policy with a second pass (`minikv.policies.kvzip`) has what was read repeated: the requests for
that, what it costs, and where keys and values are kept meanwhile are here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import gt
from time import perf_counter

from torch import Tensor

from minikv import pages
from minikv.cache.kv_cache import KVCache
from minikv.cache.stats import Fidelity, PromptFigures
from minikv.cache.tier_rows import TierError
from minikv.chat.fitting import too_much
from minikv.chat.plan import PROBES, PlanSettings, PromptPlan
from minikv.chat.protocols import Template, Tokenizer
from minikv.chat.recall import Recall
from minikv.chat.report import size
from minikv.chat.reuse import shared
from minikv.chat.stopping import Cancelling
from minikv.chat.transcript import Message
from minikv.engine.engine import Engine
from minikv.errors import Interrupted, MemoryShortError, UsageError
from minikv.policies.repeats import Wording

_FIRST = "\n\nRepeat the previous context exactly."
_LATER = "\n\nRepeat the part of the previous context exactly, starting with "
_FEW = 256  # of fewer tokens that are read twice nothing is said: a question alone is read at once


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


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads the prompt of a turn. room: expected tokens of the answer. fidelity: whether to measure
    what a recalled prompt loses. progress(done, total): called between chunks, in tokens; those
    that a policy reads twice count twice. warn(line): shows a line to the user."""

    engine: Engine
    tokenizer: Tokenizer
    template: Template
    recall: Recall
    settings: PlanSettings
    room: int
    fidelity: bool
    cancelling: Cancelling
    progress: Callable[[int, int], None] | None
    warn: Callable[[str], None]

    def read(self, plan: PromptPlan, again: Callable[[], PromptPlan]) -> tuple[PromptPlan, Read]:
        """Read what `plan` says. If `skip` stops that, read `plan.instead`. If the tier is damaged,
        read what `again()` says then. Returns the plan that was carried out and its result.

        The user is told first what a second pass costs. After any error, the cache is as it was
        before. Otherwise the caller calls `Recall.scored` once the turn counts.
        """
        cancelling = self.cancelling
        try:
            while True:
                cancelling.rereading = plan.instead is not None
                try:
                    for line in self._scoring(plan):
                        self.warn(line)
                    found = self._feed(plan)
                except TierError as error:
                    self.warn(self.recall.failed(error))
                    plan = again()
                except Interrupted:  # `progress` may raise it, too
                    if plan.instead is None or cancelling.cancelled() or not cancelling.skipped:
                        raise
                    plan = plan.instead
                    cancelling.rereading = False  # first: from here on `skip` is `cancel`
                    cancelling.skipped = False
                    self.warn("stopped reading again: this answer comes from the cache as it is")
                else:
                    cancelling.skipped = False  # `skip` came after everything was read
                    return plan, found
        except BaseException:
            self.recall.scored()
            raise
        finally:
            cancelling.rereading = False

    def _feed(self, plan: PromptPlan) -> Read:
        """Feed the prompts. `Engine.prompt` undoes one prompt; if there are several, or they
        replace the content of the cache, the old cache is kept until all of them were read."""
        began, engine, kv = perf_counter(), self.engine, self.engine.kv
        done, evict_s, peak, blind = 0, 0.0, 0, False
        coming, work = plan.length, 0  # tokens of the parts after this one, and of it
        replaces = plan.anew and kv.position > 0
        fidelity, fidelity_s = None, 0.0

        def between_chunks(so_far: int, of: int) -> None:
            nonlocal work
            # This may differ from the part's length: a recall also feeds tokens that the policies
            # observe, and some prompts are read twice.
            work = of
            whole = done + of + coming
            if self.cancelling.stopped():
                raise Interrupted(
                    f"stopped reading at {done + so_far:,} of {whole:,} tokens",
                    "the chat is as it was" if replaces else "nothing was added",
                )
            if self.progress is not None:
                self.progress(done + so_far, whole)

        gaps = not plan.anew and kv.stats().gaps
        before = kv.share()
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
                    logits, figures, fidelity, fidelity_s = self._recall(plan, between_chunks)
                else:
                    turn = max(1, len(part) - plan.begins) if plan.begins else None
                    asks, room = plan.asks and last, self.room if last else 1
                    logits = engine.prompt(part, between_chunks, room, asks, turn)
                    figures = kv.last_prompt
                # Until the last prompt was read, the old cache is kept, in case of an error. A
                # recall counts the old rows itself.
                keeps = (replaces and not plan.recalled) or done
                done += max(work, len(part))
                evict_s += figures.evict_s
                peak = max(peak, figures.peak_bytes + (before.arena.nbytes if keeps else 0))
                blind = blind or (figures.shaped and not last)
        except BaseException:
            kv.restore(before)
            raise
        pages.give_back()
        lost = figures.lost_mean, figures.lost_max, figures.lost_layer
        seconds = perf_counter() - began - fidelity_s
        return Read(seconds, logits, evict_s, peak, blind, lost, gaps, fidelity, fidelity_s)

    def _recall(
        self, plan: PromptPlan, progress: Callable[[int, int], None]
    ) -> tuple[Tensor, PromptFigures, Fidelity | None, float]:
        """Recall the whole conversation, and measure what it loses. Returns the logits of the last
        token, the figures of the pass, what was measured, and the seconds of that."""
        engine, (ids,) = self.engine, plan.parts
        self.recall.given(ids)
        logits = engine.recall(ids, progress, self.room, plan.begins)
        figures, found, began = engine.kv.last_prompt, None, perf_counter()
        if self.fidelity:
            try:
                found = engine.fidelity(ids[-1], logits, self.tokenizer.vocab)
            except (MemoryError, RuntimeError):  # the answer does not depend on it
                found = Fidelity()
        return logits, figures, found, perf_counter() - began

    def _scoring(self, plan: PromptPlan) -> Iterator[str]:
        """If a second pass scores this prompt, prepare it: make the requests, and a place for keys
        and values until `Recall.scored`. Yields lines that tell the user the cost, also of a prompt
        that is read once before for the probabilities of its tokens.

        Raises ContextError, UsageError if the budget is too small, and what `keep` raises.
        """
        kv, policy = self.engine.kv, self.settings.eviction.policy
        if plan.recalled:
            return
        if not self.settings.scores_twice:
            tokens = foreseen(kv, plan)
            if tokens >= _FEW:
                yield (
                    f"{policy} reads {tokens:,} tokens twice, first for their probabilities, which "
                    "takes about twice the time"
                )
            return
        prepare(kv, self.tokenizer, self.template)
        cost = scoring(self.engine, plan.parts, plan.behind(kv.position), plan.asks)
        if not cost.tokens:
            return
        line = cost.line(in_file=keep(self.recall, policy, cost))
        if self.settings.reuse == "auto":
            yield (
                f'`reuse="auto"` evicts before the question is seen, so that one cache serves all '
                f"questions; {policy}: {line}"
            )
        else:
            yield f"{policy} scores what is read by having it repeated: {line}"


def wording(tokenizer: Tokenizer, template: Template) -> Wording:
    """The requests of KVzip's release, and the tokens that the template puts after a question."""
    one, two = (template.opening([Message("user", text)]) for text in PROBES)
    count = shared(one[::-1], two[::-1])
    return Wording(
        tuple(tokenizer.encode(_FIRST)),
        tuple(tokenizer.encode(_LATER)),
        tuple(one[len(one) - count :]),
    )


def prepare(kv: KVCache, tokenizer: Tokenizer, template: Template) -> None:
    """Make the requests of the cache, unless they were made before."""
    if not any((kv.words.first, kv.words.later, kv.words.answer)):
        kv.words = wording(tokenizer, template)


@dataclass(frozen=True, slots=True)
class Scoring:
    """What scoring costs in addition to reading.

    read: tokens of the prompts that are scored. longest: tokens of the longest one. tokens: of the
    second pass. For the longest prompt: ram: bytes of RAM, if its keys and values are kept there;
    file: bytes of the file, if they are kept in one; reads: how often the file is read; file_ram:
    bytes of RAM in addition to the file.
    """

    read: int = 0
    longest: int = 0
    tokens: int = 0
    reads: int = 0
    ram: int = 0
    file: int = 0
    file_ram: int = 0

    def line(self, *, in_file: bool) -> str:
        """A line that tells the user the cost beforehand. in_file: keys and values are kept in a
        file."""
        times = (self.read + self.tokens) / max(1, self.read)
        held = f"{size(self.ram)} of RAM"
        if in_file:
            held = (
                f"{size(self.file)} in a file, read {self.reads} times, and {size(self.file_ram)} "
                "of RAM"
            )
        return (
            f"it reads {self.tokens:,} tokens more to score {self.read:,} ({times:.1f} times the "
            f"tokens, 2 to 4 times the time), with {held} until then"
        )


def scoring(engine: Engine, parts: Sequence[Sequence[int]], position: int, asks: bool) -> Scoring:
    """The cost of scoring the prompts `parts`, the first of which begins at `position`. asks: the
    last one is only a question. Raises ContextError if no position is left for a second pass."""
    kv, made = engine.kv, Scoring()
    for part in parts:
        cost = kv.scoring_cost(len(part), position, asks=asks and part is parts[-1])
        if cost.tokens:
            made = Scoring(
                made.read + len(part),
                max(made.longest, len(part)),
                made.tokens + cost.tokens,
                max(made.reads, cost.reads),
                max(made.ram, cost.ram),
                max(made.file, cost.file),
                max(made.file_ram, cost.file_ram),
            )
        position += len(part)
    return made


def foreseen(kv: KVCache, plan: PromptPlan) -> int:
    """How many tokens of the prompts are read once before, because the policy needs their
    probabilities: those of the prompts after which it must evict (see `KVCache.begin_probs`).
    Raises UsageError if the budget is too small."""
    rules, shape = kv.rules, kv.shape
    if rules.prompt is None or not rules.prompt.evidence.predicted:
        return 0
    position, pinned = plan.behind(kv.position), plan.pinned if plan.anew else kv.pinned
    each, found = None if plan.anew else kv.budget_rows, 0
    for part in plan.parts:
        position += len(part)
        # A share becomes a number of rows with the first prompt.
        each = each or rules.budget_rows(position, shape, kv.kv)
        totals = rules.layer_totals(each, position, shape, pinned)
        held = [shape.kv_heads * min(position, window or position) for window in shape.windows]
        if totals is None:  # all layers share one budget
            held, totals = [sum(held)], [each * shape.kv_heads * shape.layers]
        found += len(part) * any(map(gt, held, totals))
    return found


def keep(recall: Recall, policy: str, cost: Scoring) -> bool:
    """Decide where keys and values are kept until they are scored, and create the file if it is
    one. Returns True for a file, which exists until `Recall.scored`, and False for RAM, of which
    nothing is allocated yet. If `recall.kind` is "file", RAM is used only if a file failed before
    in this conversation, or needs more RAM than is free.

    Raises MemoryShortError if there is no room, and UsageError if `recall.kind` is "file" and the
    file cannot be created.
    """
    recall.scored()
    holds = f"{policy} holds all keys and values until they are scored"
    short = too_much(cost.ram, recall.free)
    if recall.kind in ("none", "ram") and short:
        raise MemoryShortError(
            f"{holds}: {short}",
            'nothing was read; `tier="file"` keeps them in a file instead, or take another '
            "`policy` or a shorter document",
        )
    if recall.kind in ("none", "ram") or (recall.kind == "auto" and not short):
        return False
    unfit = recall.broken or too_much(cost.file_ram, recall.free)
    disk = unfit or recall.keep_in_file(cost.longest)
    if not disk:
        return True
    if short:
        raise MemoryShortError(
            f"{holds}: {short}; in a file: {disk}",
            "nothing was read; take another `policy`, or a shorter document",
        )
    if not unfit:
        raise UsageError(
            f'`tier="file"` is not possible: {disk}', '`tier="ram"` keeps keys and values in memory'
        )
    return False
