"""`/verify` and `--check`: both answers, where they differ, or why it cannot be."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.cells import cell_len
from tiers import MILL, recalling
from typed import context

from minikv.chat.answer import Verification
from minikv.chat.report import AgainstFull
from minikv.chat.session import ChatSession
from minikv.cli.chat import slash_commands
from minikv.cli.chat.answer_commands import check, shown
from minikv.cli.failures import Interrupts
from minikv.cli.screen.terminal import Screen, Terminal
from minikv.errors import Interrupted, UsageError

PARTS, LATER, SAME = 48, 300, 320
"""Budgets under which the answer to "Who?" is another after 1 token, after 11 and not at all."""


def asked(**given: Any) -> ChatSession:
    session = recalling(**given)
    session.attach(MILL)
    list(session.ask("Who?", 12))
    return session


def verified(session: ChatSession, line: str = "/verify") -> None:
    slash_commands.execute(context(session, Terminal()), line)


def test_the_same_answer_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    verified(asked(budget=SAME))
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("the same: all 12 tokens, each written from all that was read")
    assert said.err.count("\n") == 1


def test_nothing_is_written_again_where_nothing_was_evicted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = asked(budget=1000)
    monkeypatch.setattr(session, "verify", lambda **given: [][0])
    verified(session)
    assert capsys.readouterr().err == "as without eviction: nothing was evicted\n"
    check(session, Terminal(), Interrupts())
    assert capsys.readouterr().err == ""


def test_answers_that_part_are_both_shown(capsys: pytest.CaptureFixture[str]) -> None:
    session = asked()
    verified(session)
    said = capsys.readouterr().err
    assert "the answer:\n" in said
    assert "from all that was read:\n" in said
    assert session.verified is not None
    assert f"the same: {session.verified.same} token" in said
    assert all(char.isprintable() or char == "\n" for char in said)


@pytest.mark.parametrize("width", [50, 80, 120])
def test_it_fits_the_screen_and_shows_no_control_characters(width: int) -> None:
    found = Verification((1, 2), "\x1b[31mred " * 40, 3, True, "\x1b[2J blue", None, True, 1.0)
    lines = shown("中文 " * 60, found, Screen(width))
    assert max(map(cell_len, lines)) <= width
    assert "\x1b" not in "".join(lines)
    assert "and from all that was read it is its end" in " ".join(" ".join(lines).split())


@pytest.mark.parametrize("budget", [PARTS, SAME])
def test_ctrl_c_stops_it_and_the_chat_is_as_it_was(
    budget: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = asked(budget=budget)
    fed, report, turns = list(session.fed), session.report, len(session.turns)
    forward, steps = session.engine.network.forward, 0

    def pressed(*args: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return forward(*args)

    monkeypatch.setattr(session.engine.network, "forward", pressed)
    with pytest.raises(Interrupted, match="stopped verifying") as caught:
        verified(session)
    assert caught.value.hint == "the chat is as it was"
    assert ("the answer:" in capsys.readouterr().err) == (budget == PARTS)
    assert session.report is not None
    assert session.report.against_full.checked == (budget == PARTS)
    assert report is not None
    still = replace(session.report, against_full=report.against_full)
    assert (session.fed, still, len(session.turns)) == (fed, report, turns)


def test_what_cannot_be_is_refused_in_a_line() -> None:
    with pytest.raises(UsageError, match="no answer to verify"):
        verified(recalling())
    with pytest.raises(UsageError, match="takes nothing"):
        verified(asked(), "/verify all")
    with pytest.raises(UsageError, match="no tier"):
        verified(asked(reuse="once"))


@pytest.mark.parametrize(
    ("budget", "words", "known"),
    [
        (PARTS, "differs from the full cache after 1 token", (False, True, 1)),
        (LATER, "differs from the full cache after 11 tokens", (False, True, 11)),
        (SAME, "as without eviction (checked)", (True, True, None)),
    ],
)
def test_check_says_which_it_was_and_puts_it_into_the_record(
    budget: int,
    words: str,
    known: tuple[bool, bool, int | None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    session = asked(budget=budget)
    assert session.report is not None
    assert session.report.against_full.words == "not checked"
    check(session, Terminal(), Interrupts())
    assert capsys.readouterr().err == f"  {words}\n"
    assert session.report.against_full == AgainstFull(*known)
    assert session.turns[-1].report is session.report
    check(session, Terminal(), Interrupts())  # it is known now
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("budget", [LATER, SAME])
@pytest.mark.parametrize("by", ["key", "ctrl-c"])
def test_check_stops_when_something_is_typed(
    budget: int, by: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session, terminal, steps = asked(budget=budget), Terminal(), 0
    before = session.report

    def typed() -> bool:
        nonlocal steps
        steps += 1
        if steps == 3 and by == "ctrl-c":
            os.kill(os.getpid(), signal.SIGINT)
        return steps == 3 and by == "key"

    monkeypatch.setattr(terminal, "keyboard", SimpleNamespace(waiting=typed))
    check(session, terminal, Interrupts())
    assert steps == 3
    assert session.verified is not None
    assert len(session.verified.tokens) == 3
    assert session.report == before
    assert capsys.readouterr().err == ""


def test_check_without_a_tier_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    session = asked(reuse="once")
    check(session, Terminal(), Interrupts())
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "no tier" in said
    assert session.report is not None
    assert session.report.against_full.words == "not checked"
    empty = recalling()
    check(empty, Terminal(), Interrupts())  # no answer yet
    assert capsys.readouterr().err == ""
