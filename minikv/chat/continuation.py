"""Continuing an answer that ended too early: when that is possible, and the record of the longer
answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from minikv.cache.stats import CacheStats
from minikv.chat.answer import Answer
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.report import AgainstFull, DeviceMemory, TurnReport
from minikv.chat.token_log import TokenLog
from minikv.errors import UsageError

_ENDS = {
    "eos": "the model ended its answer",
    "stop": "the answer ended at a stop text",
    "context": "the model's context is full",
}
_ANEW = "ask a question"


def refuse_continuation(
    report: TurnReport | None, eviction: EvictionConfig, log: TokenLog, max_context: int
) -> None:
    """Raise UsageError if the answer of this record cannot be continued.

    report: of the last turn; None if there is none. eviction: the present settings. max_context:
    positions that the model was trained for.
    """
    if report is None:
        raise UsageError("there is no answer to go on with", "ask something first")
    full = log.seen >= max_context
    why = _ENDS["context"] if full else _ENDS.get(report.stop_reason, "")
    if why:
        raise UsageError(f"there is nothing to go on with: {why}", _ANEW)
    if log.pending is None:
        raise UsageError("this answer cannot go on: where it ended is not in the cache", _ANEW)
    if (report.policy, report.policy_options, report.budget) != (
        eviction.policy,
        eviction.options_record(),
        eviction.budget_record(),
    ):
        raise UsageError(
            "this answer cannot go on: the policy or the budget was changed since",
            "set them back, or ask again",
        )


def continued(
    before: TurnReport,
    stats: CacheStats,
    answer: Answer,
    seconds: float,
    *,
    seed: int,
    sampling: Mapping[str, object],
    memory: DeviceMemory,
    against_full: AgainstFull,
    warnings: Iterable[str],
) -> TurnReport:
    """The record of the whole answer. before: its record so far. stats: the cache's present
    figures. answer: the whole answer, with the steps and seconds of the new part only. seconds:
    wall time of the new part."""
    tokens, kv, time, rate = before.tokens, before.kv_bytes, before.time_s, before.rate
    steps = round((rate.decode_tok_s or 0.0) * time.decode) + answer.steps
    decode_s = time.decode + answer.decode_s
    return replace(
        before,
        tokens=replace(
            tokens,
            generated=answer.generated,
            seen_total=stats.seen,
            evicted_total=stats.evicted,
            kept_mean=stats.kept_mean,
            kept_min=stats.kept_min,
            kept_max=stats.kept_max,
        ),
        kv_bytes=replace(
            kv,
            full=stats.full_bytes,
            held=stats.held_bytes,
            allocated=stats.allocated_bytes,
            peak_prefill=max(kv.peak_prefill, stats.peak_bytes),
            policy_state=stats.state_bytes,
        ),
        against_full=against_full,
        time_s=replace(
            time,
            decode=decode_s,
            refresh=time.refresh + answer.passes_s,
            total=time.total + seconds,
        ),
        refreshes=before.refreshes + answer.passes,
        rate=replace(rate, decode_tok_s=steps / decode_s if steps and decode_s else None),
        stop_reason=answer.reason,
        seed=seed,
        sampling=sampling,
        device_mem=memory,
        warnings=(*before.warnings, *warnings),
    )
