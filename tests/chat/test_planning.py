"""What `auto` has the next question read, and that it says so."""

from __future__ import annotations

import itertools

import pytest
from small_chat import chat, say
from test_reuse import MILL

from minikv.chat.eviction_config import EvictionConfig


@pytest.mark.parametrize("rate", [1e-3, 1.0, 1e9, None])
def test_the_answer_of_auto_depends_on_no_clock(
    rate: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that reads so many tokens per second."""
    ticks = itertools.count()
    session, plain = chat(reuse="auto"), chat(reuse="refresh")
    for each in (session, plain):
        each.attach(MILL)
    for question in ("Who?", "Why?", "And then?"):
        want = say(plain, question)
        if rate is not None:
            clock = lambda: next(ticks) * 100 / rate  # noqa: E731
            monkeypatch.setattr("minikv.chat.session.perf_counter", clock)
            monkeypatch.setattr("minikv.chat.prompt_plan.perf_counter", clock)
            monkeypatch.setattr("minikv.chat.writing.perf_counter", clock)
        assert say(session, question) == want
        monkeypatch.undo()
    assert [r.reuse for r in session.reports] == ["once", "refresh", "refresh"]


def test_auto_says_what_it_does_once_and_again_when_that_changes() -> None:
    session = chat(reuse="auto")
    session.attach(MILL)
    notes: list[str] = []
    for n, keeps in enumerate((False, False, False, True, True)):
        session.keeps_cache = keeps
        list(session.ask(f"Question {n}?", 3, notice=notes.append))
    assert [r.reuse for r in session.reports] == ["once", "refresh", "refresh", "once", "once"]
    assert len(notes) == 2
    assert notes[0].startswith('`reuse="auto"` reads everything again with each question')
    assert notes[1].startswith("the cache stays as it is, as you chose")
    session.keeps_cache = False
    list(session.ask("Last?", 3, notice=notes.append))
    assert len(notes) == 3
    assert session.report is not None
    assert session.report.reuse == "refresh"
    assert session.report.warnings == (notes[2],)


def test_auto_is_silent_where_nothing_is_at_stake() -> None:
    """Without a document, without eviction, and before there was a question."""
    for given in ({"policy": "full"}, {"budget": 900}, {}):
        session = chat(reuse="auto", **given)  # type: ignore[arg-type]
        if given:
            session.attach(MILL)
        for question in ("Who?" * 30, "Why?"):
            say(session, question)
        assert [r.reuse for r in session.reports] == ["once", "once"]
        assert not any("reuse" in w for r in session.reports for w in r.warnings)


def test_auto_follows_the_policy_of_now() -> None:
    session = chat(reuse="auto", budget=64)
    session.attach(MILL)
    say(session, "Who?")
    session.configure(EvictionConfig.read("streaming", budget=64))
    assert session.reads_again == 0
    say(session, "Why?")
    assert session.reports[1].reuse == "once"
    assert "streaming does not choose" in session.reports[1].warnings[0]
    session.configure(EvictionConfig.read("adakv", budget=64))
    assert session.reads_again == len(session.fed)


def test_auto_goes_on_where_only_that_fits() -> None:
    session = chat(reuse="auto")
    session.attach(MILL)
    say(session, "Who?")
    opening = session.template.opening
    session.template.opening = lambda messages: [*opening(messages), *[0] * 2048]  # type: ignore[method-assign]
    say(session, "Why?")
    assert session.report is not None
    assert session.report.reuse == "once"
