"""/undo and /retry as a person sees them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEngine
from small_chat import chat
from talk import Talk, make
from typed import fake_chat

from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.transcript import TokenLog
from minikv.cli.screen import render
from minikv.cli.screen.text import clean
from minikv.errors import ContextError, Interrupted


@pytest.fixture
def talk(home: Path, capsys: pytest.CaptureFixture[str]) -> Talk:
    """Over a fake, whose answers follow from every token that was fed."""
    return make(fake_chat(FakeEngine()), capsys)


def test_undo_says_what_it_took_back(talk: Talk) -> None:
    talk.session.attach("text", "a.txt")
    first = talk.ask("Who\nruns   it?")
    talk.session.attach("more", "b.txt")
    talk.ask("Why? \x1b[31m" + "x" * 100)
    out, err = talk.run("undo 2")
    assert out == ""
    cut, *lines = err.splitlines()
    assert re.fullmatch(r"undone: Why\? \[31mxxx.*…", cut)
    assert len(cut) <= 90
    again = "  a.txt will be read with your next question"
    later = "  b.txt came later and went too; /add brings it back"
    assert lines[:3] == ["undone: Who runs it?", again, later]
    assert talk.ask("Who\nruns   it?") == first
    assert talk.run("undo")[1].splitlines()[1] == again
    assert "there is no turn to undo" in talk.refused("undo")


def test_undo_says_that_the_rest_is_read_again(talk: Talk, real: Talk) -> None:
    """Where something was evicted; otherwise the cache is cut."""
    for each in (talk, real):
        for question in ("one", "two", "three"):
            each.ask(question)
        said = "your next question reads the rest of the conversation again"
        assert (said in each.run("undo")[1]) == (each is real)
        assert "asking again: two" in each.run("retry")[1]
        assert [turn.question for turn in each.session.turns] == ["one", "two"]


def test_retry_asks_the_last_question_that_was_not_taken_back(talk: Talk) -> None:
    first, second = talk.ask("one"), talk.ask("two")
    assert talk.run("retry")[0] == second
    talk.run("undo")
    assert talk.run("retry")[0] == first
    assert [turn.question for turn in talk.session.turns] == ["one"]
    assert talk.ask("two") == second
    talk.run("undo 2")
    assert "all questions were undone" in talk.refused("retry")


def test_retry_with_other_settings_is_for_one_answer(real: Talk) -> None:
    first = real.ask("Who?")
    fed, own = list(real.session.fed), real.session.eviction
    _, err = real.run("retry --policy streaming --budget=40")
    assert err.splitlines()[0].startswith("for this answer: streaming, then streaming · budget 40")
    assert "the next question reads all again, for the chat's own policy" in err
    (turn,) = real.session.turns
    assert (real.session.eviction, real.session.rereads) == (own, True)
    assert (turn.report.policy, turn.report.tokens.kept_max <= 41) == ("streaming", True)
    out, _ = real.run("retry")
    assert (out, real.session.fed, real.session.rereads) == (first, fed, False)
    _, err = real.run("retry --seed 5")
    assert err.splitlines()[0].endswith("seed 5")
    assert (real.session.reports[-1].seed, real.session.seed) == (5, 0)


@pytest.mark.parametrize("reuse", ["once", "auto"])
def test_a_retry_with_another_policy_answers_as_that_policy_does(real: Talk, reuse: str) -> None:
    """On a later question the cache is the chat's own policy's: it is not what answers."""
    other = chat(policy="streaming", budget=40, reuse="refresh")
    other.attach("A mill stands by the river. " * 8, "mill.txt")
    real.session.reuse = reuse
    real.ask("Who?")
    real.ask("Why?")
    before = real.session.snapshot()
    other.restore(replace(before, held=None, said=replace(before.said, log=TokenLog())))
    other.undo()
    other.configure(EvictionConfig.read("streaming", budget=40))
    want = "".join(other.ask("Why?", real.context.generation.max_tokens))
    out, _ = real.run("retry --policy streaming --budget 40")
    assert out.rstrip("\n") == clean(want).rstrip("\n")
    # And the next question is answered by the chat's own policy, from a cache of its own.
    retried = real.session.reports[-1]
    real.ask("And?")
    for record, policy in ((retried, "streaming"), (real.session.reports[-1], "adakv")):
        assert (record.policy, record.reuse, record.misses) == (policy, "refresh", 0)


def test_full_after_an_eviction_does_not_say_that_nothing_was(real: Talk) -> None:
    full, small = EvictionConfig.read("full"), EvictionConfig.read("streaming", budget=40)
    real.session.configure(full)
    first = real.ask("Who?")
    assert render.policy_line(real.session) == "full: nothing is evicted"
    real.session.configure(small)
    real.run("retry")  # by the policy of now
    assert real.session.reports[-1].policy == "streaming"
    real.session.configure(full)
    assert render.policy_line(real.session) == "full: nothing more is evicted"
    assert render.toolbar(real.session, 100).startswith("full: nothing more is evicted · ")
    assert real.run("retry")[0] == first
    real.session.reset()
    assert render.policy_line(real.session) == "full: nothing is evicted"


def test_a_seed_goes_to_a_policy_that_draws_unless_it_has_its_own(real: Talk) -> None:
    real.ask("Who?")
    for own, line, seed in (
        (None, "retry --policy random --seed 3", 3),
        ({}, "retry --seed 4", 4),
        ({"options": {"seed": 9}, "seed": 4}, "retry --seed 5", 9),
    ):
        if own is not None:
            real.session.configure(EvictionConfig.read("random", budget=48, **own))
        real.run(line)
        assert real.session.reports[-1].policy_options["seed"] == seed


@pytest.mark.parametrize(
    ("line", "said"),
    [
        *((f"undo {count}", "/undo takes a number") for count in ("x", "1 2", "-1", "²")),
        ("undo 0", "1 or more"),
        ("undo 2", "this chat has 1 turn"),
        ("retry --polcy x", "does not take '--polcy'"),
        ("retry adakv", "does not take 'adakv'"),
        ("retry --policy", "needs a value"),
        ("retry --policy nonsense", "nonsense"),
        ("retry --budget much", "the budget cannot be"),
        ("retry --budget 3", "too small"),
        ("retry --seed x", "--seed must be a whole number, got 'x'"),
    ],
)
def test_what_cannot_be_done_changes_nothing(real: Talk, line: str, said: str) -> None:
    assert "no question was read yet" in real.refused("retry")
    real.ask("Who?")
    assert said in real.refused(line)
    assert len(real.session.turns) == 1


@pytest.mark.parametrize("error", [Interrupted, ContextError])
def test_a_retry_that_is_stopped_while_reading_says_how_to_go_on(
    talk: Talk, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = talk.ask("one")
    prompt = talk.session.engine.prompt

    def stopped(*how: Any) -> Any:
        if error is ContextError:
            raise ContextError("too long")
        talk.session.cancel()
        return prompt(*how)

    monkeypatch.setattr(talk.session.engine, "prompt", stopped)
    with pytest.raises(error):
        talk.run("retry")
    monkeypatch.setattr(talk.session.engine, "prompt", prompt)
    told = "the question is undone; /retry asks it again" in talk.capsys.readouterr().err
    assert told or error is ContextError
    assert talk.run("retry")[0] == first
