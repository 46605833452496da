"""Closes a turn: warnings for the user, figures and the record. Making the record must not fail,
because the turn already counts. It changes nothing, so it can be repeated after an interrupt."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from minikv.cache.kv_cache import KVCache
from minikv.cache.stats import CacheStats, full_cache_bytes
from minikv.chat.answer import Answer, AnswerSettings
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.plan import PromptPlan
from minikv.chat.reading import Read
from minikv.chat.recall import Recall
from minikv.chat.report import (
    AgainstFull,
    DeviceMemory,
    KvBytes,
    Rates,
    Seconds,
    Tokens,
    TurnReport,
    amount,
)
from minikv.chat.snapshot import Conversation
from minikv.chat.transcript import Document, Template


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts for reports; none of them affects a computation. load_s: seconds of loading. kv: number
    format of cached keys and values. weights: the value of --weights. notes: messages about the
    model for the user."""

    model: str = ""
    revision: str = ""
    device: str = "cpu"
    dtype: str = "float32"
    kv: str = "float32"
    kernels: str = "torch"
    load_s: float = 0.0
    weight_bytes: int = 0
    weights: str = "auto"
    notes: tuple[str, ...] = ()

    @property
    def form(self) -> str:
        """Number format of the matrices: "plain", or the value of --weights."""
        return "plain" if self.weights == "auto" else self.weights


def device_memory(device: str) -> DeviceMemory:
    """On CUDA, what torch's allocator says. On a CPU, the peak resident memory of the process."""
    if device.startswith("cuda"):
        return DeviceMemory(
            torch.cuda.max_memory_allocated(device), torch.cuda.memory_reserved(device)
        )
    # Linux counts ru_maxrss in KiB, macOS in bytes.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return DeviceMemory(peak if sys.platform == "darwin" else peak * 1024, None)


class Warnings:
    """The warnings of one turn. lines: those for the turn record. later: those to show after the
    answer. words(line): rewrites a line for the user. notice(line): called with each line; may be
    None."""

    def __init__(self, words: Callable[[str], str], notice: Callable[[str], None] | None) -> None:
        self.lines: list[str] = []
        self.later: list[str] = []
        self._words, self._notice = words, notice

    def tell(self, *lines: str) -> None:
        """Rewrite each line, add it to the record's lines and pass it to `notice`."""
        for line in map(self._words, lines):
            self.lines.append(line)
            self.say([line])

    def say(self, lines: Iterable[str]) -> None:
        """Pass lines that are already in the record to `notice`."""
        if self._notice is not None:
            for line in lines:
                self._notice(line)


def before(
    template: Template, documents: Iterable[Document], question: str, *, first: bool
) -> Iterator[str]:
    """Warnings before the texts of a turn are read: about strings that look like control tokens or
    turn markers of the model, and about characters that its tokenizer loses. first: this is the
    first turn."""
    if first:
        yield from template.notes
    texts = [(document.name or "the document", document.text) for document in documents]
    for name, text in [*texts, ("the question", question)]:
        if count := template.lookalikes(text):
            looks = (
                "looks like a control token; it was"
                if count == 1
                else ("look like control tokens; they were")
            )
            yield f"{amount(count, 'string')} in {name} {looks} read as plain text"
        if count := template.markers(text):
            yield (
                f"{amount(count, 'string')} in {name} may pass for turn markers, which are plain "
                "text for this model: it cannot tell them from real ones"
            )
        if count := template.lost(text):
            lost = amount(count, "character")
            yield f"the model's tokenizer drops or changes {lost} of {name}"


def measured(kv: KVCache, known: CacheStats, seen: int) -> CacheStats:
    """The cache's present figures, or `known` if there is no memory to count them. seen: the tokens
    that the conversation has fed; after a failed step the cache holds none of them."""
    try:
        stats = kv.stats()
    except (MemoryError, RuntimeError):
        return replace(known, seen=seen)
    if kv.position == seen:
        return stats
    full = full_cache_bytes(kv.shape, seen, kv.dtype.itemsize)
    return replace(stats, seen=seen, full_bytes=full, evicted=seen, gaps=True, shaped=known.shaped)


def prompt_report(
    now: Conversation,
    plan: PromptPlan,
    read: Read,
    stats: CacheStats,
    settings: AnswerSettings,
    seed: int,
    eviction: EvictionConfig,
    facts: Facts,
    here: int,
) -> TurnReport:
    """The record of a turn whose answer is not written yet; `turn_report` adds the rest. now: the
    conversation before the turn. stats: of the cache after the prompt was read. here: bytes of the
    tier in the cache's own memory."""
    evicted_for = None if plan.anew else now.evicted_for_turn
    if evicted_for is None and (read.blind or stats.shaped):
        evicted_for = 0 if read.blind else now.turn + 1
    reused, reread = now.log.seen, 0
    if plan.anew:
        earlier = now.report.tokens.seen_total if now.report is not None else 0
        # The template may have left out the thoughts of earlier turns.
        reused, reread = plan.given, min(plan.tokens, max(0, earlier - plan.given))
    return TurnReport(
        turn=now.turn + 1,
        policy=eviction.policy,
        policy_options=eviction.options_record(),
        budget=eviction.budget_record(),
        kernels=facts.kernels,
        dtype=facts.dtype,
        kv_dtype=facts.kv,
        weights=facts.form,
        device=facts.device,
        tokens=Tokens(plan.tokens, reused, 0, 0, 0, 0.0, 0, 0, reread),
        kv_bytes=KvBytes(0, 0, 0, read.peak + here, 0, tier_here=here),
        time_s=Seconds(
            facts.load_s, 0.0, read.seconds, read.evict_s, 0.0, 0.0, fidelity=read.fidelity_s
        ),
        rate=Rates(plan.tokens / read.seconds if plan.tokens and read.seconds else None, None),
        loss=read.loss,
        shaped_by_turn=evicted_for,
        stop_reason="",
        seed=seed,
        sampling=settings.record(),
        device_mem=DeviceMemory(None, None),
        warnings=(),
        reuse=plan.reuse,
        fidelity=read.fidelity,
    )


def turn_report(
    before: TurnReport,
    answer: Answer,
    stats: CacheStats,
    seconds: float,
    recall: Recall,
    warnings: Iterable[str],
) -> TurnReport:
    """The record of a turn, or of one whose answer was continued. before: its record without the
    new part. answer: the whole answer, with the steps and seconds of the new part only. stats: of
    the cache after it. seconds: wall time of the new part."""
    kv, time, rate = before.kv_bytes, before.time_s, before.rate
    steps = round((rate.decode_tok_s or 0.0) * time.decode) + answer.steps
    decode_s = time.decode + answer.decode_s
    return replace(
        before,
        tokens=replace(
            before.tokens,
            generated=answer.generated,
            thoughts=answer.thoughts.tokens,
            seen_total=stats.seen,
            evicted_total=stats.evicted,
            kept_mean=stats.kept_mean,
            kept_min=stats.kept_min,
            kept_max=stats.kept_max,
        ),
        kv_bytes=KvBytes(
            full=stats.full_bytes,
            held=stats.held_bytes,
            allocated=stats.allocated_bytes,
            peak_prefill=max(kv.peak_prefill - kv.tier_here, stats.peak_bytes) + recall.here,
            policy_state=stats.state_bytes,
            tier=recall.nbytes,
            tier_here=recall.here,
        ),
        time_s=replace(
            time,
            first_token=seconds if answer.first_s is None else answer.first_s,
            decode=decode_s,
            thoughts=time.thoughts + answer.thought_s,
            total=time.total + seconds,
        ),
        rate=replace(rate, decode_tok_s=steps / decode_s if steps and decode_s else None),
        stop_reason=answer.reason,
        device_mem=device_memory(before.device),
        warnings=(*before.warnings, *warnings),
        tier=recall.place,
        against_full=against_full(stats, recall),
    )


def against_full(stats: CacheStats, recall: Recall) -> AgainstFull:
    """What is known about an answer without writing it again: if no row is missing at its end, none
    was missing before. Rows of an int8 tier differ from those that were read."""
    rounded = recall.tokens > 0 and recall.dtype == "int8"
    return AgainstFull(None if stats.gaps or rounded else True)
