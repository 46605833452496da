"""Closing a turn: its figures and its record. Nothing here may fail, because the turn already
counts. Nothing is changed, so that it can be done again after an interrupt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from minikv.cache.kv_cache import KVCache
from minikv.cache.stats import CacheStats
from minikv.chat.answer import Answer, AnswerSettings
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.facts import Facts, device_memory
from minikv.chat.prompt_plan import PromptPlan, Read
from minikv.chat.recall import Recall
from minikv.chat.report import (
    UNKNOWN,
    AgainstFull,
    KvBytes,
    Loss,
    Rates,
    Seconds,
    Tokens,
    TurnReport,
)


def measured(kv: KVCache, known: CacheStats, seen: int) -> CacheStats:
    """The cache's present figures; if it was dropped, or there is no memory to count them, `known`.
    seen: the tokens that the conversation has fed."""
    try:
        if kv.position == seen:
            return kv.stats()
    except (MemoryError, RuntimeError):
        pass
    return replace(known, seen=seen)


def turn_report(
    turn: int,
    plan: PromptPlan,
    read: Read,
    answer: Answer,
    stats: CacheStats,
    seconds: float,
    *,
    reused: int,
    settings: AnswerSettings,
    seed: int,
    eviction: EvictionConfig,
    shaped_by: int | None,
    facts: Facts,
    recall: Recall,
    baseline_tok_s: float | None,
    warnings: Iterable[str],
) -> TurnReport:
    """The record of a turn: what was read, the answer, and the cache after it. seconds: of the
    whole turn. reused: tokens of the conversation that were not fed again."""
    return TurnReport(
        turn=turn,
        policy=eviction.policy,
        policy_options=eviction.options_record(),
        budget=eviction.budget_record(),
        kernels=facts.kernels,
        dtype=facts.dtype,
        kv_dtype=facts.kv,
        weights=facts.form,
        device=facts.device,
        tokens=Tokens(
            prompt_new=plan.tokens,
            prompt_reused=reused,
            generated=answer.generated,
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
            peak_prefill=max(read.peak, stats.peak_bytes) + recall.here,
            policy_state=stats.state_bytes,
            tier=recall.nbytes,
            tier_here=recall.here,
        ),
        time_s=Seconds(
            load=facts.load_s,
            compile=None,
            first_token=seconds if answer.first_s is None else answer.first_s,
            prefill=read.seconds,
            evict=read.evict_s,
            decode=answer.decode_s,
            total=seconds,
            refresh=answer.passes_s,
            fidelity=read.fidelity_s,
        ),
        rate=Rates(
            prefill_tok_s=plan.tokens / read.seconds if read.seconds else None,
            decode_tok_s=answer.rate,
            baseline_decode_tok_s=baseline_tok_s,
        ),
        loss=_loss(read),
        shaped_by_turn=shaped_by,
        stop_reason=answer.reason,
        seed=seed,
        sampling=settings.record(),
        device_mem=device_memory(facts.device),
        warnings=tuple(warnings),
        reuse=plan.reuse,
        tier=recall.place,
        refreshes=answer.passes,
        fidelity=read.fidelity,
        against_full=against_full(stats, recall),
    )


def against_full(stats: CacheStats, recall: Recall) -> AgainstFull:
    """What is known of an answer without writing it again: if no row is missing at its end, none
    was missing before. Rows of an int8 tier are not those that were read."""
    rounded = recall.tokens > 0 and recall.dtype == "int8"
    return AgainstFull(None if stats.gaps or rounded else True)


def _loss(read: Read) -> Loss:
    """The loss for the turn record."""
    if read.gaps:
        return Loss(None, None, None, UNKNOWN)
    return Loss(*read.lost, None if read.lost[0] is None else "window")
