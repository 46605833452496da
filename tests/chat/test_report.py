"""The record of a turn, and how it is shown."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from small_chat import chat, reported

from minikv.chat import report as shown
from minikv.chat.report import (
    STOPS,
    AgainstFull,
    DeviceMemory,
    KvBytes,
    Loss,
    Rates,
    Seconds,
    Tokens,
    TurnReport,
    of_full,
    percent_saved,
    size,
)
from minikv.cli.saved.listing import report_of
from minikv.cli.screen import render

MIB = 1 << 20


def report(**changes: Any) -> TurnReport:
    made = TurnReport(
        turn=1,
        policy="adakv",
        policy_options={"window": 32, "decode": {"policy": "none"}},
        budget={"unit": "rows", "value": 512},
        kernels="torch",
        dtype="bfloat16",
        device="cpu",
        tokens=Tokens(7091, 0, 214, 7305, 6579, 726.0, 350, 2184),
        kv_bytes=KvBytes(957_480_960, 95_158_272, 128 * MIB, 929_431_552, 0),
        time_s=Seconds(6.2, 0.82, 0.78, 0.038, 5.1, 6.0),
        rate=Rates(9091.0, 41.7),
        loss=Loss(0.031, 0.068, 16, "window"),
        shaped_by_turn=1,
        stop_reason="eos",
        seed=0,
        sampling={"temperature": 0.0},
        device_mem=DeviceMemory(17_000_000_000, None),
        warnings=("careful",),
    )
    return replace(made, **changes)


KEYS = {
    "policy_options": "decode window",
    "budget": "unit value",
    "tokens": "prompt_new prompt_reused generated seen_total evicted_total kept_mean kept_min "
    "kept_max prompt_reread thoughts",
    "kv_bytes": "full held allocated peak_prefill policy_state tier tier_here",
    "time_s": "load first_token prefill evict decode total fidelity thoughts",
    "rate": "prefill_tok_s decode_tok_s",
    "loss": "est_mass_lost_mean est_mass_lost_max est_mass_lost_argmax_layer method",
    "sampling": "temperature",
    "device_mem": "peak_bytes reserved_bytes",
    "against_full": "same checked tokens",
}
PLAIN = (
    "turn policy kernels dtype device shaped_by_turn stop_reason seed warnings reuse kv_dtype "
    "weights tier fidelity dropped"
)


def test_the_record_has_exactly_the_documented_keys() -> None:
    record = report().to_dict()
    inner = {key: {*value} for key, value in record.items() if isinstance(value, dict)}
    assert inner == {key: {*names.split()} for key, names in KEYS.items()}
    assert {*record} == {*KEYS, *PLAIN.split()}
    assert json.loads(json.dumps(record)) == record


def test_the_two_lines() -> None:
    assert report().lines() == (
        "214 tokens · 41.7 tok/s · first token 0.82 s",
        "KV 90.8 of 913.1 MiB (90.0% saved) · kept 726 of 7,305 tokens per head · not checked",
    )
    second = report(turn=2, stop_reason="length")
    speed, memory, misses = second.lines()
    assert speed.endswith("stopped by max_tokens")
    assert memory.endswith("per head · not checked")
    assert misses == "may miss what question 1 did not need; `chat.refresh()` reads all again"
    again = report(turn=2, shaped_by_turn=2, reuse="refresh")
    assert len(again.lines()) == 2
    assert again.lines()[1].endswith("per head · read again · not checked")
    blind = report(shaped_by_turn=0, reuse="blind")
    assert blind.lines()[1].endswith("per head · evicted before any question · not checked")


def test_a_rate_that_was_not_measured_or_says_nothing_is_not_shown() -> None:
    plain = "214 tokens · first token 0.82 s"
    assert report(rate=Rates(None, None)).lines()[0] == plain
    few = report(tokens=replace(report().tokens, generated=1))
    assert few.lines()[0] == "1 token · first token 0.82 s"


@pytest.mark.parametrize(
    ("known", "words"),
    [
        (AgainstFull(), "not checked"),
        (AgainstFull(True), "as without eviction"),
        (AgainstFull(True, True), "as without eviction (checked)"),
        (AgainstFull(False, True, 22), "differs from the full cache after 22 tokens"),
        (AgainstFull(False, True, 1), "differs from the full cache after 1 token"),
        (AgainstFull(False, True, 0), "differs from the full cache from the first token on"),
    ],
)
def test_one_word_about_the_answer_stands_under_it_and_in_the_record(
    known: AgainstFull, words: str
) -> None:
    made = report(against_full=known)
    assert made.lines()[1].endswith(f" · {words}")
    assert f"answer     {words}" in render.stats(made)
    assert report_of(json.loads(json.dumps(made.to_dict()))) == made
    assert "lost" not in " ".join(made.lines())


@pytest.mark.parametrize(
    ("held", "full", "text"),
    [
        *((64, 1024, "93.7%"), (100, 1000, "90.0%"), (1, 3, "66.6%"), (1, 10**9, "99.9%")),
        *((1100, 1000, "0.0%"), (0, 0, "0.0%"), (1000, 1000, "0.0%")),
        (999_999, 1_000_000, "0.0%"),
    ],
)
def test_saved_is_rounded_against_us(held: int, full: int, text: str) -> None:
    assert percent_saved(KvBytes(full, held, 0, 0, 0).saved) == text


# Where, and of what: KiB of a cache of about 1,000, full, held, allocated, peak, state, tier, tier
# here.
SAVED = """
cpu         1000 900 900 0 0          KV 900.0 of 1,000.0 KiB (10.0% saved)
cpu         1000 900 900 0 100        KV 900.0 of 1,000.0 KiB (10.0% saved)
cpu         1000 1000 1000 0 0        KV 1,000.0 KiB (nothing saved)
cpu         914 956 956 0 50          KV 956.0 KiB (nothing saved)
cpu file    1000 100 100 0 0 990 0    KV 100.0 of 1,000.0 KiB (90.0% saved)
cpu ram     1000 100 100 0 0 990 990  KV and tier 1.1 MiB (nothing saved)
cpu ram     1000 100 100 0 0 500 500  KV and tier 600.0 of 1,000.0 KiB (40.0% saved)
cuda:0 ram  1000 100 100 0 0 990 0    KV 100.0 of 1,000.0 KiB (90.0% saved) + 990.0 KiB in RAM
"""


@pytest.mark.parametrize("row", SAVED.strip().splitlines())
def test_what_is_saved_is_counted_where_it_is(row: str) -> None:
    where, kib, words = re.split("  +", row)
    (device, *tier), kv = where.split(), KvBytes(*(1024 * int(n) for n in kib.split()))
    made = report(device=device, kv_bytes=kv, tier="".join(tier))
    assert made.memory == words
    assert made.lines()[1].startswith(f"{words} · kept")
    assert f"memory     {words}" in render.stats(made)
    assert words in dict(render.figures(made))["memory"]
    assert words in repr(made)


def test_a_cache_that_has_everything_says_that_nothing_was_evicted() -> None:
    tokens = replace(report().tokens, evicted_total=0)
    whole = report(tokens=tokens, kv_bytes=KvBytes(MIB, MIB, MIB, 1, 0))
    assert whole.lines()[1] == "KV 1.0 MiB (nothing evicted) · not checked"
    assert "evict " not in render.stats(whole)


def test_sizes() -> None:
    shown = "0 B|1,023 B|1.0 KiB|1.5 KiB|3.0 MiB|5.0 GiB"
    assert "|".join(map(size, (0, 1023, 1024, 1536, 3 * MIB, 5 << 30))) == shown
    pairs = ((1 << 19, 3 * MIB), (3 * MIB, 1 << 19), (10, 20))
    assert [of_full(*pair) for pair in pairs] == ["0.5 of 3.0 MiB", "3.0 of 0.5 MiB", "10 of 20 B"]


@pytest.mark.parametrize("reason", sorted(set(STOPS) - {"eos"}))
def test_the_line_and_the_statistics_say_the_same_of_the_end(reason: str) -> None:
    ended = report(stop_reason=reason)
    said = f"stopped by {STOPS[reason]}"
    assert ended.lines()[0].endswith(said)
    assert f"· {said}\n" in render.stats(ended)


HOSTILE = "<script>alert(1)</script> & \"quotes\" 'too' \x1b[31m\u202egnp\x00\nnew line"


def test_a_line_is_short_and_has_no_control_characters() -> None:
    assert shown.line("chat", ["", HOSTILE, "2 turns"]).startswith("<minikv chat: <script>")
    assert all(c.isprintable() for c in shown.line("chat", [HOSTILE]))
    assert len(shown.line("chat", ["word " * 1000])) < 330
    assert shown.clipped("one two three", 7) == "one tw…"


def test_a_chat_and_its_report() -> None:
    session = chat(budget=64)
    session.attach("The mill of Orlin. " * 20, HOSTILE)
    assert repr(session) == "<minikv chat: adakv with h2o, budget 64, 0 turns, 0 of 2,048 tokens>"
    list(session.ask(HOSTILE.replace("\x00", ""), 4))
    report = reported(session)
    assert repr(session).endswith(f"1 turn, {len(session.fed):,} of 2,048 tokens>")
    assert repr(report).startswith(f"<minikv report: turn 1, {report.tokens.prompt_new:,} tokens")
    assert f"({report.saved})" in repr(report)
    assert "\n" not in repr(report) + repr(session)
