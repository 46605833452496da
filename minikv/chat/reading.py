"""Reads the planned prompts, or others if reading is stopped or the tier fails.

A policy with a second pass (`minikv.policies.kvzip`) makes the model repeat the text. This module
also makes the requests for that, computes the cost, and decides where keys and values are stored
meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter

import torch
from torch import Tensor

from minikv import pages
from minikv.cache.kv_cache import KVCache
from minikv.cache.plan import PassCost
from minikv.cache.snapshot import State
from minikv.cache.stats import Fidelity
from minikv.cache.tier_rows import TierError
from minikv.chat.fitting import too_much
from minikv.chat.plan import PROBES, PlanSettings, PromptPlan
from minikv.chat.recall import Recall
from minikv.chat.report import UNKNOWN, Loss, size
from minikv.chat.stopping import Cancelling
from minikv.chat.transcript import Message, Template, Tokenizer, shared
from minikv.engine.engine import Engine
from minikv.errors import Interrupted, MemoryShortError, UsageError
from minikv.policies.repeats import Wording

_FIRST = "\n\nRepeat the previous context exactly."
_LATER = "\n\nRepeat the part of the previous context exactly, starting with "


@dataclass(frozen=True, slots=True)
class Tools:
    """The parts of a chat that read and write."""

    engine: Engine
    tokenizer: Tokenizer
    template: Template
    recall: Recall
    cancelling: Cancelling


@dataclass(frozen=True, slots=True)
class Read:
    """The result of reading a turn.

    seconds: wall time without `fidelity_s`. logits: of the last token, float32 [V]. evict_s:
    seconds of eviction. peak: the most bytes allocated at once. blind: a policy that scores with
    the question has evicted before a question was read. loss: of the last part. fidelity: of a
    recalled prompt, if measured; fidelity_s: seconds of measuring.
    """

    seconds: float
    logits: Tensor
    evict_s: float
    peak: int
    blind: bool
    loss: Loss
    fidelity: Fidelity | None = None
    fidelity_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads the prompt of a turn. seen: the token ids that the cache has seen. room: expected
    tokens of the answer. fidelity: whether to measure what a recalled prompt loses. progress(done,
    total): called between chunks, in tokens; tokens that a policy reads twice count twice.
    warn(line): shows a line to the user."""

    tools: Tools
    settings: PlanSettings
    seen: Sequence[int]
    room: int
    fidelity: bool
    progress: Callable[[int, int], None] | None
    warn: Callable[[str], None]

    def read(self, plan: PromptPlan, again: Callable[[], PromptPlan]) -> tuple[PromptPlan, Read]:
        """Carry out `plan`; if the tier is damaged, the plan that `again()` returns then. Returns
        the plan that was carried out and its result.

        The user is told beforehand what a second pass costs. After any error, the cache is as it
        was before. Otherwise the caller must call `Recall.scored` once the turn counts.
        """
        recall = self.tools.recall
        try:
            while True:
                try:
                    for line in self._scoring(plan):
                        self.warn(line)
                    return plan, self._feed(plan)
                except TierError as error:
                    self.warn(recall.failed(error))
                    plan = again()
        except BaseException:
            recall.scored()
            raise

    def _feed(self, plan: PromptPlan) -> Read:
        """Feed the prompts. `Engine.prompt` can undo one prompt; if there are several, or they
        replace the content of the cache, the old cache is kept until all of them were read."""
        began, engine, kv = perf_counter(), self.tools.engine, self.tools.engine.kv
        replaces, gaps, found = plan.anew and kv.position > 0, False, list[tuple[State, int]]()
        done, work, coming = 0, 0, plan.length  # tokens of earlier parts, this one, and later ones

        def between_chunks(so_far: int, of: int) -> None:
            nonlocal work
            # A recall also feeds tokens that the tier has, because the policies observe them.
            known = max(0, of - plan.tokens) if plan.recalled else 0
            so_far, of = max(0, so_far - known), of - known
            work = of  # may be more than the part's length: some prompts are read twice
            whole = done + of + coming
            if self.tools.cancelling.cancelled():
                raise Interrupted(
                    f"stopped reading at {done + so_far:,} of {whole:,} tokens",
                    "the chat is as it was" if replaces else "nothing was added",
                )
            if self.progress is not None and whole:
                self.progress(done + so_far, whole)

        before = kv.share()
        try:
            if replaces and not plan.recalled:
                engine.reset()
            if plan.anew and plan.pinned and plan.pinned != kv.pinned:
                kv.pin(plan.pinned)
            told = [] if plan.anew else [*self.seen]
            for part in plan.parts:
                told += part
                kv.sentences = sentences(kv, self.tools.tokenizer, told)
                last, coming = part is plan.parts[-1], coming - len(part)
                if found or not plan.anew:
                    gaps = kv.stats().gaps
                if plan.recalled:
                    self.tools.recall.given(part)
                    logits = engine.recall(part, between_chunks, self.room, plan.begins)
                else:
                    turn = max(1, len(part) - plan.begins) if plan.begins else None
                    asks, room = plan.asks and last, self.room if last else 1
                    logits = engine.prompt(part, between_chunks, room, asks, turn)
                found.append((kv.state, kv.peak))
                done += max(work, len(part))
            read = perf_counter()
            fidelity = self._fidelity(plan, logits)
            fidelity_s = perf_counter() - read
        except BaseException:
            kv.restore(before)
            raise
        finally:
            kv.sentences = None
        pages.give_back()
        # The old cache is kept until the last prompt was read, in case of an error. A recall counts
        # the old rows itself.
        kept = before.arena.nbytes
        first = kept if replaces and not plan.recalled else 0
        peaks = [peak + (kept if number else first) for number, (_, peak) in enumerate(found)]
        outcomes = [state.outcome for state, _ in found]
        return Read(
            read - began,
            logits,
            sum(state.evict_s for state, _ in found),
            max(peaks),
            any(outcome.shaped for outcome in outcomes[:-1]),
            _loss(outcomes[-1].lost, gaps=gaps),
            fidelity,
            fidelity_s,
        )

    def _fidelity(self, plan: PromptPlan, logits: Tensor) -> Fidelity | None:
        """Measure what the prompt lost, if it was recalled and `fidelity` is set. logits: of its
        last token."""
        if not (plan.recalled and self.fidelity):
            return None
        try:
            vocab = self.tools.tokenizer.vocab
            return self.tools.engine.fidelity(plan.ids[-1], logits, vocab)
        except (MemoryError, RuntimeError):  # the answer does not depend on it
            return Fidelity()

    def _scoring(self, plan: PromptPlan) -> Iterator[str]:
        """If a second pass scores this prompt, prepare it: make the requests, and decide where keys
        and values are stored until `Recall.scored`. Yields a line that tells the user the cost.

        Raises ContextError, UsageError if the budget is too small, and what `keep` raises.
        """
        kv, policy = self.tools.engine.kv, self.settings.eviction.policy
        if plan.recalled or not self.settings.scores_twice:
            return
        prepare(kv, self.tools.tokenizer, self.tools.template)
        costs, position = list[tuple[int, PassCost]](), plan.behind(kv.position)
        for part in plan.parts:
            asks = plan.asks and part is plan.parts[-1]
            costs.append((len(part), kv.scoring_cost(len(part), position, asks=asks)))
            position += len(part)
        costs = [each for each in costs if each[1].tokens]
        if not costs:
            return
        read, more = sum(tokens for tokens, _ in costs), sum(cost.tokens for _, cost in costs)
        most = max((cost for _, cost in costs), key=lambda cost: cost.ram)
        held = f"{size(most.ram)} of RAM"
        if keep(self.tools.recall, policy, max(tokens for tokens, _ in costs), most):
            held = f"{size(most.file)} in a file, read {most.reads} times, and "
            held += f"{size(most.file_ram)} of RAM"
        line = (
            f"it reads {more:,} tokens more to score {read:,} ({(read + more) / read:.1f} times "
            f"the tokens, 2 to 4 times the time), with {held} until then"
        )
        if self.settings.reuse == "auto":
            yield (
                f'`reuse="auto"` evicts before the question is seen, so that one cache serves all '
                f"questions; {policy}: {line}"
            )
        else:
            yield f"{policy} has the model repeat the text to score it: {line}"


def wording(tokenizer: Tokenizer, template: Template) -> Wording:
    """The requests as in KVzip's release, and the tokens that the template puts after a
    question."""
    one, two = (template.opening([Message("user", text)]) for text in PROBES)
    count = shared(one[::-1], two[::-1])
    return Wording(
        tuple(tokenizer.encode(_FIRST)),
        tuple(tokenizer.encode(_LATER)),
        tuple(one[len(one) - count :]),
    )


def sentences(kv: KVCache, tokenizer: Tokenizer, ids: Sequence[int]) -> Tensor | None:
    """See `PromptView.sentences`; None if no policy needs it. ids: of the whole conversation."""
    if not kv.rules.evidence.sentences:
        return None
    ended = accumulate(tokenizer.sentence_ends(ids), initial=0)
    return torch.tensor([*ended][:-1], device=kv.device)


def prepare(kv: KVCache, tokenizer: Tokenizer, template: Template) -> None:
    """Make the requests for the cache's second pass, unless they exist already."""
    if not any((kv.words.first, kv.words.later, kv.words.answer)):
        kv.words = wording(tokenizer, template)


def _loss(layers: Sequence[float | None], *, gaps: bool) -> Loss:
    """An estimate, without rows that had left before the prompt (`gaps`). layers:
    see `Outcome.lost`."""
    lost = [(share, layer) for layer, share in enumerate(layers) if share is not None]
    if gaps or not lost:
        return Loss(None, None, None, UNKNOWN if gaps else None)
    return Loss(sum(share for share, _ in lost) / len(lost), *max(lost), "window")


def keep(recall: Recall, policy: str, longest: int, most: PassCost) -> bool:
    """Decide where keys and values are stored until they are scored, and create the file if it is
    one. Returns True for a file, which exists until `Recall.scored`, and False for RAM, of which
    none is allocated yet. If `recall.kind` is "file", RAM is used only if a file failed before in
    this conversation, or needs more RAM than is free. longest: tokens of the longest prompt. most:
    the cost of the prompt that takes the most memory.

    Raises MemoryShortError if there is no room, and UsageError if `recall.kind` is "file" and the
    file cannot be created.
    """
    recall.scored()
    holds = f"{policy} holds all keys and values until they are scored"
    short = too_much(most.ram, recall.free())
    if recall.kind != "file" and not short:
        return False
    if recall.kind in ("none", "ram"):
        raise MemoryShortError(
            f"{holds}: {short}",
            'nothing was read; `tier="file"` keeps them in a file instead, or take another '
            "`policy` or a shorter document",
        )
    unfit = recall.broken or too_much(most.file_ram, recall.free())
    disk = unfit or recall.keep_in_file(longest)
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
