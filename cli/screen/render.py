"""Text for people: the statistics of a turn, strips of shades, the header of a chat."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from minikv.cache.stats import Fidelity
from minikv.chat.report import PLACES, STOPS, UNKNOWN, TurnReport, size
from minikv.cli.chat.turn import TOY, is_toy
from minikv.cli.screen.terminal import BLOCKS
from minikv.cli.screen.text import grid

if TYPE_CHECKING:
    from minikv.chat.session import ChatSession


PIPED = "piped text"
"""The name that is shown of a document without one."""


def level(share: float, most: int) -> int:
    """A step from 0 to `most` for a share from 0 to 1, rounded up, so that only 0 gives 0."""
    if share <= 0:
        return 0
    # The small term undoes rounding errors: a share of 0.1 of ten steps is one step.
    return min(most, max(1, math.ceil(share * most - 1e-6)))


def strip(values: Sequence[float], largest: float) -> str:
    """One character per value, as high as its share of `largest`, between two bars."""
    top = len(BLOCKS) - 1
    return f"|{''.join(BLOCKS[level(v / largest if largest else 0.0, top)] for v in values)}|"


def percent(share: float) -> str:
    """Whole percent, rounded down; 100% also for all but one in a million."""
    whole = math.floor(100 * share + 1e-4)
    return "<1%" if share > 0 and whole < 1 else f"{whole}%"


_LISTED = 8  # up to this many documents, a chat begins with a line for each
_READ = {
    "once": "only new tokens were read",
    "refresh": "the whole conversation was read again for this question",
    "blind": "documents were read and evicted before the question",
    "recall": "chosen for this question from all that was read; only new tokens were read",
}


def stats(report: TurnReport) -> str:
    """The figures of a turn as text, one topic per line."""
    return grid(figures(report), "<<")


def figures(report: TurnReport) -> list[tuple[str, str]]:
    """All measurements of a turn: (topic, figures)."""
    tokens, kv, time, rate = report.tokens, report.kv_bytes, report.time_s, report.rate
    loss, memory = report.loss, report.device_mem
    shaped = ""
    if report.shaped_by_turn is not None:
        by = f"question {report.shaped_by_turn}" if report.shaped_by_turn else "no question"
        shaped = f" · evicted for {by}"
    lost = "not known: tokens were evicted before" if loss.method == UNKNOWN else "not estimated"
    if loss.est_mass_lost_mean is not None:
        lost = f"~{100 * loss.est_mass_lost_mean:.1f}% of the last window's lost"
        if loss.est_mass_lost_max is not None and loss.est_mass_lost_argmax_layer is not None:
            worst = f"worst layer {loss.est_mass_lost_argmax_layer}"
            lost += f" ({worst}: {100 * loss.est_mass_lost_max:.1f}%)"
        lost += ", an estimate to compare within one policy"
    thoughts = ""
    if tokens.thoughts:
        thoughts = f", {tokens.thoughts:,} of them of thought ({time.thoughts:.2f} s)"
    rows = [
        (
            f"turn {report.turn}",
            f"policy {policy_words(report)} · {budget_words(report.budget)}{shaped}",
        ),
        (
            "tokens",
            f"{tokens.prompt_reused:,} before + {tokens.prompt_new:,} read · "
            f"{tokens.generated:,} written{thoughts} · stopped by {STOPS[report.stop_reason]}",
        ),
        (
            "kept",
            f"{tokens.kept_mean:,.1f} of {tokens.seen_total:,} per head "
            f"(min {tokens.kept_min:,}, max {tokens.kept_max:,})",
        ),
        (
            "memory",
            f"{report.memory}"
            + f", {size(kv.policy_state)} of it the state of the policy" * bool(kv.policy_state),
        ),
        ("allocated", f"{size(kv.allocated)} for the cache"),
        ("tier", report.tier and f"{size(kv.tier)} in {PLACES[report.tier]}: all that was read"),
        ("peak", f"{size(kv.peak_prefill)} while reading; the network's work space comes on top"),
        (
            "time",
            f"load {time.load:.1f} s · read {time.prefill:.2f} s{per_second(rate.prefill_tok_s)}"
            + f", {1000 * time.evict:.0f} ms of it evicting" * (not report.whole)
            + f" · first token {time.first_token:.2f} s · "
            f"write {time.decode:.2f} s{per_second(rate.decode_tok_s)}",
        ),
        ("answer", report.against_full.words),
        ("attention", lost),
        ("fidelity", _fidelity(report.fidelity) if report.fidelity else ""),
        ("weights", report.weights if report.weights != "plain" else ""),
    ]
    if report.reuse != "once" or report.turn > 1:
        misses = f"; it may miss what question {report.misses} did not need"
        words = f"{report.reuse}: {_READ[report.reuse]}{misses if report.misses else ''}"
        rows.insert(2, ("reuse", words))
    if memory.peak_bytes is not None:
        where = "GPU" if memory.reserved_bytes is not None else "process"
        rows.append((where, f"{size(memory.peak_bytes)} at the most"))
    return [row for row in rows if row[1]]


def _fidelity(lost: Fidelity) -> str:
    """ "from the kept tokens alone, the first would be 0.0031 nats off · attention output off by
    4.1%"."""
    if lost.kl_first_token is None:
        return "not measured: out of memory"
    text = f"from the kept tokens alone, the first would be {lost.kl_first_token:.2g} nats off"
    if lost.output_error_mean is not None:
        text += f" · attention output off by {100 * lost.output_error_mean:.1f}%"
    if lost.output_error_max is not None and lost.output_error_layer is not None:
        text += f" (worst layer {lost.output_error_layer}: {100 * lost.output_error_max:.1f}%)"
    return text


def header(session: ChatSession, version: str, max_tokens: int) -> str:
    """The first lines of a chat: machine, model, policy, documents. max_tokens: the longest
    answer."""
    facts = session.facts
    at = f" @ {facts.revision[:12]}" if facts.revision else ""
    form = facts.dtype if facts.form == "plain" else f"{facts.form} in {facts.dtype}"
    rows = [
        ("minikv", f"{version} · {facts.device}"),
        (
            "model",
            f"{facts.model}{at} · {form} · {size(facts.weight_bytes)} · "
            f"context {session.max_context:,}",
        ),
        ("memory", session.fits(max_tokens) or policy_line(session)),
    ]
    if is_toy(session):
        rows.insert(2, ("", TOY.removeprefix("bundled: ")))
    waiting = session.pending
    if len(waiting) > _LISTED:
        characters = sum(len(document.text) for document in waiting)
        rows.append(("documents", f"{len(waiting):,} · {characters:,} characters · /docs"))
        return grid(rows, "<<")
    rows += [
        ("document", f"{document.name or PIPED} · {len(document.text):,} characters")
        for document in waiting
    ]
    return grid(rows, "<<")


def policy_line(session: ChatSession) -> str:
    """The eviction settings in force."""
    eviction = session.eviction
    if not eviction.may_evict:
        return f"full: nothing {'more ' * _gaps(session)}is evicted"
    pair = pair_words(eviction.policy, eviction.decode)
    if eviction.budget.everything:
        return f"nothing evicted · budget auto, {pair} if not all fits"
    return f"{pair} · {budget_words(eviction.budget_record())}"


def _gaps(session: ChatSession) -> bool:
    """Whether tokens were evicted, other than those outside a layer's sliding window."""
    if not session.fed or session.report is None:
        return False
    windows = [w for w in session.engine.kv.shape.windows if w is not None]
    tokens = session.report.tokens
    return tokens.kept_min < min([tokens.seen_total, *windows])


def toolbar(session: ChatSession, width: int) -> str:
    """The line below the line editor. Items that do not fit are left out."""
    eviction, report = session.eviction, session.report
    read = len(session.fed or session.known)
    used = [f"{read:,} of {session.max_context:,} tokens"]
    held = [f"KV {size(report.kv_bytes.taken)}", *used] if report else used
    whole = policy_line(session).split(" · ")  # with the budget, if there is one
    named = [] if eviction.budget.everything else [[eviction.policy, *held]]
    choices = [used, held, *named, [whole[0], *held], [*whole, *held]]
    lines = [" · ".join(items) for items in choices]
    return next((line for line in reversed(lines) if len(line) <= width), lines[0])


def policy_words(report: TurnReport) -> str:
    """ "global-span, then h2o"."""
    decode = report.policy_options.get("decode")
    return pair_words(report.policy, decode.get("policy") if isinstance(decode, Mapping) else None)


def pair_words(policy: str, decode: object) -> str:
    """The policy for prompts and the policy for answers, if there is one."""
    return policy if decode in (None, "none") else f"{policy}, then {decode}"


def budget_words(budget: Mapping[str, object]) -> str:
    """A budget record in words."""
    unit, value = budget.get("unit"), budget.get("value")
    if unit == "auto":
        return "budget auto" + (f": {value:,} tokens per head" if value else ": nothing evicted")
    if not isinstance(value, int | float):
        return "no budget"
    if unit == "rows":
        return f"budget {value:g} tokens per head"
    if unit == "share":
        return f"budget {100 * value:g}% of the prompt"
    return f"budget {size(int(value))}"


def per_second(value: float | None) -> str:
    """ " (41.7 tok/s)", or "" if it was not measured."""
    return "" if value is None else f" ({value:,.1f} tok/s)"
