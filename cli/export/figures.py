"""The figures of a turn as rows of a table, shared by the HTML report and the transcript."""

from __future__ import annotations

from collections.abc import Sequence

from minikv.chat.report import STOPS, UNKNOWN, TurnReport, size
from minikv.cli.render import budget_words, fidelity_rows, per_second, policy_words


def rows(report: TurnReport) -> Sequence[tuple[str, str]]:
    """Every figure of a turn: (name, value). The value says so if it was not measured."""
    tokens, kv, time, rate = report.tokens, report.kv_bytes, report.time_s, report.rate
    table = [
        ("Policy", f"{policy_words(report)}, {budget_words(report.budget)}"),
        ("Tokens read", f"{tokens.prompt_new:,} new, {tokens.prompt_reused:,} before"),
        ("Tokens written", f"{tokens.generated:,}, stopped by {STOPS[report.stop_reason]}"),
        (
            "Tokens kept per head",
            f"{tokens.kept_mean:,.1f} of {tokens.seen_total:,} "
            f"(min {tokens.kept_min:,}, max {tokens.kept_max:,})",
        ),
        ("Memory", report.memory),
        ("of it, kept by the policy", size(kv.policy_state)),
        ("Allocated for the cache", size(kv.allocated)),
        ("KV at the most", f"{size(kv.peak_prefill)}, while reading"),
        ("Reading", f"{time.prefill:.2f} s{per_second(rate.prefill_tok_s)}"),
        ("Evicting", f"{1000 * time.evict:,.0f} ms"),
        ("First token after", f"{time.first_token:.2f} s"),
        ("Writing", f"{time.decode:.2f} s{per_second(rate.decode_tok_s)}"),
        ("Answer", report.against_full.words),
        ("Attention lost", _lost(report)),
        *((name.capitalize(), words) for name, words in fidelity_rows(report)),
    ]
    by = report.shaped_by_turn
    if by is not None:
        misses = ": the answer may miss what that question did not need" if report.misses else ""
        table.append(("Evicted for", f"question {by}{misses}" if by else "no question"))
    if report.device_mem.peak_bytes is not None:
        where = "GPU" if report.device_mem.reserved_bytes is not None else "process"
        table.append((f"Memory of the {where}", f"{size(report.device_mem.peak_bytes)} at most"))
    return table


def _lost(report: TurnReport) -> str:
    mean, most = report.loss.est_mass_lost_mean, report.loss.est_mass_lost_max
    if mean is None:
        return "not estimated" if report.loss.method != UNKNOWN else "not known (evicted before)"
    text = f"~{100 * mean:.1f}%"
    if most is not None and report.loss.est_mass_lost_argmax_layer is not None:
        text += f", worst layer {report.loss.est_mass_lost_argmax_layer}: {100 * most:.1f}%"
    return f"{text} (an estimate from the last window)"
