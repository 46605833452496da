"""`/compare`: the same question under other policies, and a running chat that nobody touched."""

from __future__ import annotations

import itertools
import os
import signal
import weakref
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from layouts import segment
from lettered import lettered
from pairwise import pairwise, some_by_day
from refusals import refused
from small_chat import reported, scripted
from tables import table
from test_kept import HOSTILE, STORY, chat
from typed import context, on_screen

from minikv.cache.arena import Arena
from minikv.chat.eviction_config import EvictionConfig, read_budget
from minikv.chat.recall import Recall
from minikv.chat.session import ChatSession
from minikv.chat.transcript import Document
from minikv.cli.chat import compare
from minikv.cli.chat.compare import Run, Stop
from minikv.cli.screen.terminal import Terminal
from minikv.errors import ContextError, Interrupted
from minikv.policies import prompt_names
from minikv.settings import Generation

BUDGET = 48


def asked(
    *questions: str, document: str = STORY, name: str | None = "story.txt", **more: Any
) -> ChatSession:
    """A chat under adakv that has answered. more: as of `chat`."""
    eviction = EvictionConfig.read("adakv", "h2o", BUDGET)
    session = chat(eviction=eviction, step="h2o", budget=BUDGET, **more)
    session.attach(document, name)
    for question in questions:
        list(session.ask(question, 5))
    return session


def rows(arena: Arena, layers: int = 3, kv_heads: int = 3) -> str:
    """All that the heads hold, bit by bit."""
    where = itertools.product(arena.columns, range(layers), range(kv_heads))
    return str([(at, segment(arena, *at).tolist()) for at in where])


STATE = "fed pending_token messages documents pending turn report eviction evicted_for_turn".split()


def state(session: ChatSession) -> list[Any]:
    """All that a chat is made of, bit by bit."""
    heads = [session.kept(layer, head).tolist() for layer in range(3) for head in range(3)]
    told = [copy(getattr(session, name)) for name in STATE]
    return [heads, rows(session.engine.kv.arena), *told]


def compared(session: ChatSession, *arguments: str) -> None:
    compare._compare(context(session, Terminal()), list(arguments))


def run(session: ChatSession, name: str, question: str, tokens: int) -> Run:
    return compare.run(session, name, question, Generation(tokens), lambda *_: None, Stop())


# -- the chat is untouched ------------------------------------------------------------------
WINDOWS = ((None, None), (24, None))
TIERS = some_by_day(
    pairwise([p for p in prompt_names() if p != "full"], ("ram", "file"), (1, 3), WINDOWS),
    lambda case: case[0] in ("adakv", "streaming", "h2o", "tova"),
)


def with_tier(policy: str, tier: str, turns: int, windows: tuple[int | None, ...]) -> ChatSession:
    """A chat with a tier, over cache memory that is born full of NaN. The last of the turns may
    bring a second document."""
    eviction = EvictionConfig.read("adakv", budget="48")
    session = lettered(eviction, windows=windows, tier=tier, reuse="recall")
    session.attach(STORY * 2, "story.txt")
    for question in ("Who?", "Why so?", "And the well?")[:turns]:
        if question.startswith("And"):
            session.attach("Later a well was dug. " * 5, "later.txt")
        list(session.ask(question, 7))
    return session


@pytest.mark.parametrize(("policy", "tier", "turns", "windows"), TIERS)
def test_a_tier_gives_what_reading_again_gives(
    policy: str, tier: str, turns: int, windows: tuple[int | None, ...]
) -> None:
    """To the last bit: the answers, and every row that the caches then hold. The chat's next answer
    is as if nothing had been compared."""
    session, untouched = (with_tier(policy, tier, turns, windows) for _ in range(2))
    question, documents = session.turns[-1].question, session.documents
    for eviction in compare.read_choices(session, [policy])[policy != "adakv" :]:
        runs, caches, recalled = [], [], False
        for lends in (True, False):
            other = compare.beside(session, eviction)
            if not lends:
                other.recall = Recall(other.engine.kv)
                other.engine.kv.tier = None
            runs.append(run(other, policy, question, 12))
            caches.append(rows(other.engine.kv.arena, 2, 2))
            recalled = recalled or runs[-1].report.tokens.prompt_reused > 0
        (lent, again), report = runs, runs[0].report
        assert (lent.text, lent.tokens) == (again.text, again.tokens)
        assert caches[0] == caches[1]
        assert recalled == (eviction.rules().cannot_recall is None)
        if recalled:  # the first document is not read again, a second one is
            second = sum(len(d.rendered()) for d in documents[1:])
            assert report.tokens.prompt_new < second + 32 + 96
            assert report.reuse == "recall"
        peak = again.report.kv_bytes.peak_prefill  # a file is read two layers at a time
        assert replace(report.kv_bytes, peak_prefill=peak) == again.report.kv_bytes
    assert "".join(session.ask("Next?", 9)) == "".join(untouched.ask("Next?", 9))
    assert reported(session).tokens == reported(untouched).tokens
    session.recall.leave()
    untouched.recall.leave()


def test_a_tier_that_is_damaged_or_int8_is_read_around() -> None:
    """The rows of an int8 one are not those that reading gives."""
    eviction = EvictionConfig.read("adakv", budget="48")
    session = lettered(eviction, tier="ram", tier_dtype="int8", reuse="recall")
    session.attach(STORY, "story.txt")
    list(session.ask("Who?", 5))
    assert session.recall.tokens
    assert not compare.beside(session, EvictionConfig.read("full")).recall.tokens
    session, clean = (with_tier("streaming", "file", 2, WINDOWS[0]) for _ in range(2))
    handle = session.recall.file._files[0]
    session.recall.file.sync()
    for at in range(3 * 4096, os.fstat(handle).st_size, 64):  # behind the header and commits
        os.pwrite(handle, b"\x5a", at)
    answers = []
    for one in (session, clean):
        other = compare.beside(one, EvictionConfig.read("streaming", budget="48"))
        answers.append(run(other, "", "Why so?", 9))
        one.recall.leave()
    assert answers[0].tokens == answers[1].tokens
    assert answers[0].report.tokens.prompt_reused == 0
    assert "damaged" in answers[0].report.warnings[0]


def test_the_running_chat_is_as_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is one more cache at a time."""
    caches, real = list[Any](), compare.run

    def watched(other: ChatSession, *given: Any) -> Run:
        assert all(cache() is None or not cache().rows for cache in caches)
        try:
            return real(other, *given)
        finally:
            caches.append(weakref.ref(other.engine.kv.arena))

    monkeypatch.setattr(compare, "run", watched)
    session, untouched = asked("Who?", "Why?"), asked("Who?", "Why?")
    for each in (session, untouched):
        each.attach("more", "later.txt")
    before, random = state(session), torch.get_rng_state()
    compared(session, "streaming", "h2o", "budget=56")
    assert len(caches) == 4
    assert state(session) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert "".join(session.ask("Next?", 6)) == "".join(untouched.ask("Next?", 6))
    assert all(torch.equal(session.kept(2, h), untouched.kept(2, h)) for h in range(3))
    out, err = capsys.readouterr()
    assert not out
    assert "\x1b" not in err
    assert "streaming 56" in err
    assert "h2o 56" in err
    assert "the question before it and its answer are in none" in " ".join(err.split())


def test_runs_are_fresh_chats_under_each_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, list[Run]]] = []
    monkeypatch.setattr(compare, "table", lambda q, _, runs, screen: shown.append((q, runs)) or "")
    session = asked("Who?")
    report = reported(session)
    compared(session)
    question, (own, full) = shown[0]
    assert (question, own.label, full.label) == ("Who?", "adakv 48", "full")
    # The chat's own first answer, and that of a chat that evicts nothing.
    assert own.text == session.messages[-1].content
    assert own.tokens == (*session.fed[report.tokens.prompt_new :], session.pending_token)
    dense = chat("full", "none")
    dense.attach(STORY, "story.txt")
    assert full.text == "".join(dense.ask("Who?", 5))
    assert own.report.tokens == report.tokens
    assert full.report.tokens.kept_min == full.report.tokens.seen_total
    assert full.report.sampling["temperature"] == 0


def test_what_a_policy_reads_more_is_told_before_it_is_paid(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And once, not again after the table."""
    session = asked("Who?", document=STORY * 2)
    began: list[str] = []

    def live(terminal: Any, name: str) -> Any:
        terminal.say(f"{name} begins")

        def show(done: int, total: int, written: int) -> None:
            if name not in began:
                began.append(name)
                terminal.say(f"{name} reads")

        return show

    monkeypatch.setattr(compare, "_live", live)
    compared(session, "kvzip", "streaming")
    err = capsys.readouterr().err
    words = "tokens more to score"
    assert err.count(words) == 1
    name = f"kvzip {BUDGET}"
    order = [err.index(f"{name} begins"), err.index(words), err.index(f"{name} reads")]
    assert order == sorted(order)
    assert f"! {name}: " in err
    assert "! full:" not in err


# -- what is asked --------------------------------------------------------------------------
def test_policies_of_a_comparison() -> None:
    session = asked("Who?")

    def labels(*arguments: str) -> list[str]:
        return [compare.label(c) for c in compare.read_choices(session, arguments)]

    assert labels() == labels("full") == labels("adakv") == ["adakv 48", "full"]
    assert labels("budget=20%") == ["adakv 20%", "full"]
    several = labels("streaming", "full", "h2o", "streaming", "adakv")
    assert several == ["adakv 48", "streaming 48", "h2o 48", "full"]
    session.eviction = replace(EvictionConfig.read("adakv", "roco"), budget=read_budget(64))
    assert labels("adakv") == ["adakv then roco 64", "full"]
    session.eviction = EvictionConfig.read("tova", budget=64, stride=8)
    assert labels() == ["tova stride 8 64", "full"]
    assert compare.read_choices(session, [])[0] == session.eviction
    session.eviction = EvictionConfig.read("adakv")  # under --budget auto
    assert labels("snapkv", "budget=96") == ["adakv 96", "snapkv 96", "full"]
    assert labels("snapkv") == ["adakv 512", "snapkv 512", "full"]
    session.eviction = session.eviction.under(64)
    assert labels() == ["adakv 64", "full"]
    session.eviction = EvictionConfig.read("full", budget=512)
    assert labels("snapkv") == ["snapkv 512", "full"]


@table("""
    arguments          | said
    sanpkv             | snapkv
    snapkv budget=     | policies and budget=N, got 'budget='
    snapkv window=4    | policies and budget=N, got 'window=4'
    snapkv budget=many | budget
    snapkv budget=2    | too small for adakv
""")
def test_bad_arguments_before_anything_runs(
    arguments: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = asked("Who?")
    monkeypatch.delattr(compare, "run")
    before = state(session)
    error = refused("", compared, session, *arguments.split())
    assert said in f"{error} {error.hint}"
    assert state(session) == before


def test_what_can_and_cannot_be_compared(capsys: pytest.CaptureFixture[str]) -> None:
    session = asked(name=None, windows=(None, 40, None))
    list(session.ask("Who?", 3))
    compared(session)
    assert "nothing evicted" in capsys.readouterr().err
    session = chat("full", "none", eviction=EvictionConfig.read("full"))
    refused("no question", compared, session)
    list(session.ask("Who?", 2))
    refused("evicts nothing", compared, session)
    # A document that does not fit gives the session's error.
    session = asked("Who?")
    (turn,) = session.turns
    session.turns[0] = replace(turn, documents=(*turn.documents, Document("x" * 4000)))
    before = state(session)
    says = "this model was trained for 4,096 positions"
    refused(says, compared, session, error=ContextError)
    assert state(session) == before


# -- Ctrl-C ---------------------------------------------------------------------------------
@pytest.mark.parametrize(("after", "runs"), [(0, 1), (4, 1), (30, 2), (50, 3)])
def test_ctrl_c_stops_it(
    after: int, runs: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session, untouched = asked("Who?"), asked("Who?")
    calls = []

    def live(terminal: object, name: str) -> Any:
        def show(done: int, total: int, written: int) -> None:
            calls.append((name, done, written))
            if len(calls) == after + 1:
                os.kill(os.getpid(), signal.SIGINT)

        return show

    monkeypatch.setattr(compare, "_live", live)
    before, handler = state(session), signal.getsignal(signal.SIGINT)
    stopped = refused("", compared, session, "streaming", "adakv", error=Interrupted)
    told = (f"stopped comparing at {calls[-1][0]}", "the chat is as it was")
    assert (str(stopped), stopped.hint) == told
    assert len(calls) <= after + 2
    assert signal.getsignal(signal.SIGINT) is handler
    assert state(session) == before
    assert "".join(session.ask("Next?", 4)) == "".join(untouched.ask("Next?", 4))
    assert len({name for name, _, _ in calls}) == runs
    # What was finished is shown if there is something to compare.
    assert ("same as full" in capsys.readouterr().err) == (runs == 3)


# -- the table ------------------------------------------------------------------------------
def runs_of(texts: list[str]) -> list[Run]:
    report = reported(asked("Who?"))
    kept = replace(report.tokens, kept_min=report.tokens.seen_total)
    full, evicted = (
        replace(report, tokens=tokens, loss=replace(report.loss, est_mass_lost_mean=lost))
        for tokens, lost in ((kept, None), (report.tokens, 0.031))
    )
    last = len(texts) - 1
    return [
        Run(f"policy{i} 48", text, (1, 2, i), full if i == last else evicted)
        for i, text in enumerate(texts)
    ]


def test_side_by_side_with_the_full_cache_last() -> None:
    runs = runs_of(["below 3.25x", "", "below 3.25x tested"])
    lines = compare.table("What leverage?", 0, runs, 100).split("\n")
    assert lines[0] == "question: What leverage?"
    assert lines[1].split() == ["policy0", "48", "policy1", "48", "policy2", "48"]
    row = {line[:12].strip(): line for line in lines[2:]}
    assert "below 3.25x" in row["answer"]
    assert "(empty)" in row["answer"]
    assert "first 2 of 3 tokens" in row["same as full"]
    assert row["same as full"].endswith(" -")
    assert {"memory", "read", "write"} <= {*row}
    assert "lost" not in row  # the row above says how far the answers agree
    assert not any("before it" in line for line in lines)


@pytest.mark.parametrize("width", [40, 70, 80, 200])
@pytest.mark.parametrize("count", [2, 3, 6])
def test_columns_or_blocks_fit(width: int, count: int) -> None:
    runs = runs_of([f"{HOSTILE} 中文字 answer {i}\nsecond line" * 3 for i in range(count)])
    made = compare.table(f"why {HOSTILE}" * 9, 3, runs, width)
    lines = made.split("\n")
    assert "\n".join(on_screen(made, width)).startswith("\n".join(lines[:-2]))  # none is broken
    beside = sum("policy0 48" in line and "policy1 48" in line for line in lines)
    assert beside == (width >= 80 and (width - 13) // count >= 22)
    text = " ".join(" ".join(lines).split())
    assert "the 3 questions before it" in text
    assert "bold" in text


@table("""
    tokens | full | said
    12     | 12   | all 2 tokens
    1      | 1    | 1 token
           |      | both are empty
    13     | 12   | first 1 of 2 tokens
    12     | 123  | first 2 of 3 tokens
    123    | 1    | first 1 of 1 token
    9      | 12   | none of 2 tokens
           | 1    | none of 1 token
""")
def test_same_as_full(tokens: str, full: str, said: str) -> None:
    assert compare.same_as(tuple(map(int, tokens)), tuple(map(int, full))) == said


@pytest.mark.parametrize(
    ("own", "baseline", "tokens", "said"),
    [
        (41.79, 40.0, 16, ", x1.04 of full"),
        (39.9, 40.0, 16, ", x0.99 of full"),
        (39.9999, 40.0, 16, ", x0.99 of full"),
        (40.8, 40.0, 16, ", x1.02 of full"),
        (40.0, 40.0, 99, ", x1.00 of full"),
        (41.8, 40.0, 15, ""),
        (41.8, None, 16, ""),
        (None, 40.0, 16, ""),
    ],
)
def test_how_much_faster_than_full(
    own: float | None, baseline: float | None, tokens: int, said: str
) -> None:
    def with_rate(run: Run, rate: float | None, count: int) -> Run:
        report = run.report
        speed = replace(report.rate, decode_tok_s=rate)
        counts = replace(report.tokens, generated=count)
        return replace(run, report=replace(report, rate=speed, tokens=counts))

    one, full = runs_of(["a", "b"])
    one, full = with_rate(one, own, tokens), with_rate(full, baseline, 16)
    assert compare.facts(one, full)["write"].endswith(said or ("d" if own is None else "s"))
    assert "of full" not in compare.facts(one, one)["write"]


def test_the_count_on_the_live_line_goes_on_behind_thoughts() -> None:
    shown: list[int] = []
    session = scripted("so and so\n</think>\n\nYes, it is.", opens=True)
    compare.run(session, "", "Why?", Generation(60), lambda _, of, n: shown.append(n), Stop())
    assert shown[-1] == max(shown) > len("Yes, it is.")
