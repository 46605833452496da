"""`--budget auto`: nothing is evicted while everything fits, then as much as fits stays; the plan
and the chat agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small import network, shape
from small_chat import chat, reported, say, talked

from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.fitting import USEFUL, Machine, fit_words, tier_beside, usable
from minikv.chat.recall import Recall
from minikv.chat.session import ChatSession
from minikv.cli.forecast import Planner
from minikv.errors import ContextError, Interrupted
from minikv.loader import build
from minikv.models.weights import weight_bytes
from minikv.settings import Settings

LONG = "A mill stands by the river and grinds. " * 40  # 1,560 tokens of bytes
MIB = 1 << 20
ADAKV = EvictionConfig.read("adakv")


def machine(**given: Any) -> Machine:
    kinds = given.pop("dtype", torch.float32), given.pop("kv", torch.float32)
    return Machine(
        shape(network(layers=4, max_context=20_000)), *kinds, lambda tokens: 100 * tokens, **given
    )


FITTED = [ADAKV, EvictionConfig.read("snapkv+global", "none"), EvictionConfig.read("h2o")]
FITTED += [EvictionConfig.read("kvzip"), EvictionConfig.read("roco", stride=32)]


@pytest.mark.parametrize("eviction", FITTED, ids=lambda one: one.pair)
def test_the_largest_budget_of_two_digits_that_fits_is_taken(eviction: EvictionConfig) -> None:
    one, tokens = machine(), 6000
    (_, whole), (_, least) = (one.needs(eviction.under(n), tokens, 64) for n in (0, USEFUL))  # type: ignore[misc]
    assert least < whole
    found = []
    for part in range(9):
        free = 8 * (least + (whole - least) * part // 8) // 7 + 8
        rows = one.rows(eviction, tokens, 64, free)
        found.append(rows or tokens)
        if rows:
            step = 10 ** (len(str(rows)) - 2)
            now, more = (one.needs(eviction.under(n), tokens, 64) for n in (rows, rows + step))
            assert max(now) <= usable(free) or rows == USEFUL
            assert rows == USEFUL or rows % step == 0
            assert rows + step >= tokens or (more is not None and max(more) > usable(free))
            # A later question of the same length finds the same room, and keeps as much.
            arena = now[1] - now[0]
            assert rows == USEFUL or one.rows(eviction, tokens, 64, free - arena, arena) == rows
    assert found == sorted(found)
    assert found[-1] == tokens, "all of it fits"
    assert found[0] < 2 * USEFUL
    assert one.rows(eviction, tokens, 64, None) == 0, "where free memory is not known"
    assert one.rows(EvictionConfig.read("full"), tokens, 64, 1) == 0


def test_a_tier_in_the_caches_own_memory_counts_only_where_something_is_evicted() -> None:
    kinds = shape(network(layers=4, max_context=20_000)), torch.float32, 6000
    assert tier_beside(*kinds, "file", "same", cuda=False) == 0
    assert tier_beside(*kinds, "ram", "same", cuda=True) == 0
    here = tier_beside(*kinds, "ram", "same", cuda=False)
    one = machine(beside=lambda tokens: here)
    for rows, more in ((0, 0), (1000, here)):
        without, beside = (each.needs(ADAKV.under(rows), 6000, 8) for each in (machine(), one))
        assert beside == (without[0] + more, without[1] + more)


def fitting(most: int) -> Callable[[EvictionConfig, int, int], int]:
    """As if so many tokens fitted whole, and 64 tokens per head of longer conversations."""
    return lambda eviction, tokens, answer: 0 if tokens + answer <= most else 64


def talk(most: int, **given: Any) -> ChatSession:
    session = chat(budget="auto", reuse="auto", fit=fitting(most), **given)
    session.recall = Recall(session.engine.kv, "ram", "same")
    return session


def test_nothing_is_evicted_while_all_fits_and_the_answers_are_the_full_caches() -> None:
    session, full = talk(10_000), chat("full")
    for one in (session, full):
        one.attach(LONG)
    assert session.fits() == "all of it fits: nothing is evicted"
    for question in ("Who?", "Why?"):
        assert say(session, question) == say(full, question)
    for report in session.reports:
        assert report.budget == {"unit": "auto", "value": None}
        assert report.saved == "nothing evicted"
        assert report.against_full.words == "as without eviction"
        assert report.tier == ""
    assert session.engine.kv.stats().state_bytes == 0


def test_what_does_not_fit_any_more_is_said_and_stays_evicted() -> None:
    session, lines = talk(1700), list[str]()
    session.attach(LONG)
    say(session, "Who?")
    assert not session.eviction.evicts
    session.attach(LONG[:400])
    assert session.fits() == fit_words(64, len(session.fed) + 447)
    list(session.ask("Why?", 8, notice=lines.append))
    assert [line for line in lines if "64 tokens per head fit" in line]
    assert session.reports[-1].budget == {"unit": "auto", "value": 64}
    assert session.reports[-1].against_full.words == "not checked"
    held = session.engine.kv.stats().kept_mean
    assert held <= 64
    # The cache is smaller now, and all may fit again: it stays as it is until a new conversation.
    session.fit = fitting(10_000)
    list(session.ask("And?", 8, notice=lines.append))
    assert session.reports[-1].budget == {"unit": "auto", "value": 64}
    assert sum("tokens per head fit" in line for line in lines) == 1
    session.reset()
    session.attach(LONG)
    say(session, "Who?")
    assert reported(session).budget == {"unit": "auto", "value": None}


def test_a_turn_that_reads_nothing_decides_nothing() -> None:
    session = talked(talk(1700), LONG * 2)
    before = session.eviction
    with pytest.raises(ContextError):  # too long for the context
        say(session, "Who?")
    assert session.eviction == before
    session.pending.clear()
    session.attach(LONG + LONG[:400])

    with pytest.raises(Interrupted):
        list(session.ask("Who?", 8, progress=lambda *_: session.cancel()))
    assert session.eviction == before
    assert session.engine.kv.state.rows is None


@pytest.mark.parametrize("tier", ["auto", "ram"])
@pytest.mark.parametrize("policy", ["adakv", "h2o"])
def test_a_plan_keeps_what_the_chat_keeps(
    monkeypatch: pytest.MonkeyPatch, policy: str, tier: str
) -> None:
    settings = Settings(policy=policy, tier=tier, device="cpu")
    session, tokens, kept = build(settings), 7000, list[int | None]()
    weights = weight_bytes(session.engine.network.config, torch.float32, "auto")  # type: ignore[attr-defined]
    for free in (20 * MIB, 60 * MIB, 68 * MIB, 74 * MIB, 90 * MIB, 200 * MIB):
        monkeypatch.setattr("minikv.models.weights.free_memory", lambda device, free=free: free)
        planner = Planner(settings, free + weights)
        planned = planner.row(policy, 0, tokens, 64)
        kept.append(planned.rows)
        assert session.fit(session.eviction, tokens, 64) == (planned.rows or 0)
    assert kept[0] == USEFUL
    assert kept[-1] is None
    assert len(set(kept)) >= 3


def test_more_memory_never_keeps_less_and_a_short_question_changes_nothing() -> None:
    kept = []
    for free in range(200, 1400, 75):
        session = chat(budget="auto", reuse="auto")
        kv = session.engine.kv
        one = Machine(kv.shape, kv.dtype, kv.kv, lambda tokens: 0)

        def fit(*asked: Any, kv: Any = kv, one: Machine = one, memory: int = 1024 * free) -> int:
            """As the loader has it, where `memory` bytes are free beside the cache."""
            return one.rows(*asked, memory - kv.arena.nbytes, kv.arena.nbytes)

        session.fit = fit
        session.recall = Recall(kv, "file", "same")
        session.attach(LONG)
        for question in ("Who?", "Why?", "So?"):
            list(session.ask(question, 8))
        budgets = [report.budget["value"] or len(session.fed) for report in session.reports]
        assert budgets == sorted(budgets, reverse=True)
        assert budgets[-1] >= 0.95 * budgets[0], (free, budgets)
        kept.append(budgets[0])
    assert kept == sorted(kept)
    assert len(set(kept)) >= 4
