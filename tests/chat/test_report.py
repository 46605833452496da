"""The turn record: its key names, its arithmetic, and rounding that never flatters."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from minikv.chat.report import (
    STOPS,
    UNKNOWN,
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
from minikv.cli import render

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
        time_s=Seconds(6.2, None, 0.82, 0.78, 0.038, 5.1, 6.0),
        rate=Rates(9091.0, 41.7, None),
        loss=Loss(0.031, 0.068, 16, "window"),
        shaped_by_turn=1,
        stop_reason="eos",
        seed=0,
        sampling={"temperature": 0.0},
        device_mem=DeviceMemory(17_000_000_000, None),
        warnings=("careful",),
    )
    return replace(made, **changes)


def test_the_record_has_exactly_the_documented_keys() -> None:
    record = report().to_dict()
    assert {key: sorted(value) for key, value in record.items() if isinstance(value, dict)} == {
        "policy_options": ["decode", "window"],
        "budget": ["unit", "value"],
        "tokens": sorted(
            [
                "prompt_new",
                "prompt_reused",
                "generated",
                "seen_total",
                "evicted_total",
                "kept_mean",
                "kept_min",
                "kept_max",
            ]
        ),
        "kv_bytes": sorted(["full", "held", "allocated", "peak_prefill", "policy_state", "tier"]),
        "time_s": sorted(
            [
                "load",
                "compile",
                "first_token",
                "prefill",
                "evict",
                "decode",
                "total",
                "refresh",
                "fidelity",
            ]
        ),
        "rate": sorted(["prefill_tok_s", "decode_tok_s", "baseline_decode_tok_s"]),
        "loss": sorted(
            ["est_mass_lost_mean", "est_mass_lost_max", "est_mass_lost_argmax_layer", "method"]
        ),
        "sampling": ["temperature"],
        "device_mem": sorted(["peak_bytes", "reserved_bytes"]),
    }
    assert {key for key, value in record.items() if not isinstance(value, dict)} == {
        "turn",
        "policy",
        "kernels",
        "dtype",
        "device",
        "shaped_by_turn",
        "stop_reason",
        "seed",
        "warnings",
        "reuse",
        "kv_dtype",
        "weights",
        "tier",
        "refreshes",
        "fidelity",
    }
    assert json.loads(json.dumps(record)) == record


def test_the_two_lines() -> None:
    assert report().lines() == (
        "214 tok · 41.7 tok/s · first token 0.82 s",
        "KV 90.8 of 913.1 MiB (90.0% saved) · kept 726 of 7,305 tok/head · lost ~3.1%",
    )
    second = report(turn=2, stop_reason="length", loss=Loss(None, None, None, None))
    speed, memory, misses = second.lines()
    assert speed.endswith("stopped by max_tokens")
    assert memory.endswith("tok/head")
    assert misses == "may miss what question 1 did not need; `chat.refresh()` reads all again"
    again = report(turn=2, shaped_by_turn=2, reuse="refresh")
    assert len(again.lines()) == 2
    assert again.lines()[1].endswith("lost ~3.1% · read again")
    blind = report(shaped_by_turn=0, reuse="blind")
    assert blind.lines()[1].endswith("lost ~3.1% · evicted before any question")


def test_a_loss_that_earlier_evictions_hide_is_not_given_as_a_number() -> None:
    later = report(turn=3, loss=Loss(None, None, None, UNKNOWN))
    assert later.lines()[1].endswith("tok/head · loss not known")


def test_a_rate_that_was_not_measured_is_not_shown() -> None:
    assert report(rate=Rates(None, None, None)).lines()[0] == "214 tok · first token 0.82 s"


@pytest.mark.parametrize(
    ("held", "full", "text"),
    [
        (64, 1024, "93.7%"),
        (100, 1000, "90.0%"),
        (1, 3, "66.6%"),
        (1100, 1000, "0.0%"),
        (0, 0, "0.0%"),
        (1000, 1000, "0.0%"),
        (999_999, 1_000_000, "0.0%"),
        (1, 10**9, "99.9%"),
    ],
)
def test_saved_is_rounded_against_us(held: int, full: int, text: str) -> None:
    assert percent_saved(KvBytes(full, held, 0, 0, 0).saved) == text


@pytest.mark.parametrize(
    ("held", "state", "words"),
    [
        (900, 0, "10.0% saved"),
        (900, 100, "10.0% saved"),  # what the policy stores is a part of what is held
        (999_999, 0, "nothing to save yet"),
        (1000, 0, "nothing to save yet"),
        (1032, 32, "nothing to save yet"),
        (1010, 32, "nothing to save yet"),  # less was freed than the policy stores
    ],
)
def test_nothing_saved_is_said_in_words(held: int, state: int, words: str) -> None:
    kv = KvBytes(1000, held, held, held, state)
    assert report(kv_bytes=kv).saved == words
    assert f" ({words}) · kept" in report(kv_bytes=kv).lines()[1]


def test_a_full_cache_has_nothing_to_save() -> None:
    """Not even later: nothing is evicted under this policy. What an earlier one evicted counts."""
    full = report(budget={"unit": None, "value": None}, kv_bytes=KvBytes(1000, 1000, 1, 1, 0))
    assert full.saved == "nothing to save"
    assert replace(full, kv_bytes=KvBytes(1000, 700, 1, 1, 0)).saved == "30.0% saved"


def test_sizes() -> None:
    assert [size(n) for n in (0, 1023, 1024, 1536, 3 * MIB, 5 << 30)] == [
        "0 B",
        "1,023 B",
        "1.0 KiB",
        "1.5 KiB",
        "3.0 MiB",
        "5.0 GiB",
    ]
    assert of_full(1 << 19, 3 * MIB) == "0.5 of 3.0 MiB"
    assert of_full(3 * MIB, 1 << 19) == "3.0 of 0.5 MiB"
    assert of_full(10, 20) == "10 of 20 B"


@pytest.mark.parametrize("reason", sorted(set(STOPS) - {"eos"}))
def test_the_line_and_the_statistics_say_the_same_of_the_end(reason: str) -> None:
    ended = report(stop_reason=reason)
    said = f"stopped by {STOPS[reason]}"
    assert ended.lines()[0].endswith(said)
    assert f"· {said}\n" in render.stats(ended)
