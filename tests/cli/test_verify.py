"""`/verify`: both answers, where they part, or why it cannot be."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from rich.cells import cell_len
from test_kept import context
from tiers import MILL, recalling

from minikv.chat.session import ChatSession
from minikv.chat.verify import Verification
from minikv.cli import commands
from minikv.cli.strips import Screen
from minikv.cli.verify import shown
from minikv.errors import Interrupted, UsageError


def asked(**given: Any) -> ChatSession:
    session = recalling(**given)
    session.attach(MILL)
    list(session.ask("Who?", 12))
    return session


def verified(session: ChatSession, line: str = "/verify") -> None:
    commands.execute(context(session), line)


def test_the_same_answer_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    verified(asked(budget=1000))
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("the same: all 12 tokens, each written from all that was read")
    assert said.err.count("\n") == 1


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


@pytest.mark.parametrize("budget", [48, 1000])
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
    assert ("the answer:" in capsys.readouterr().err) == (budget == 48)  # it parts at once
    assert (session.fed, session.report, len(session.turns)) == (fed, report, turns)


def test_what_cannot_be_is_refused_in_a_line() -> None:
    with pytest.raises(UsageError, match="no answer to verify"):
        verified(recalling())
    with pytest.raises(UsageError, match="takes nothing"):
        verified(asked(), "/verify all")
    with pytest.raises(UsageError, match="no tier"):
        verified(asked(reuse="once"))
