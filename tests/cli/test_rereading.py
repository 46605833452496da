"""--reuse auto on a terminal: asked once about a long reading, and Ctrl-C answers without it."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from small_chat import chat
from typed import context

import minikv.cli.chat.command
from minikv.chat.session import ChatSession
from minikv.cli.chat.command import converse
from minikv.cli.screen.terminal import Terminal
from minikv.settings import Generation

MILL = "A mill stands by the river and grinds. " * 8


def talk(
    session: ChatSession, lines: Sequence[str | type[BaseException]], *, typed: bool = True
) -> int:
    """A chat in which these lines come in; how many of them were taken."""
    session.attach(MILL)
    coming: Iterator[str | type[BaseException]] = iter(lines)
    taken = 0

    def read_line() -> str:
        nonlocal taken
        line = next(coming, EOFError)
        if isinstance(line, str):
            taken += 1
            return line
        raise line

    there = context(session, Terminal(), Generation(max_tokens=4))
    assert converse(there, read_line, typed=typed) == 0
    return taken


def modes(session: ChatSession) -> list[str]:
    return [report.reuse for report in session.reports]


@pytest.mark.parametrize(
    ("limit", "typed", "answers", "later"),
    [
        (100, True, [""], "refresh"),
        (100, True, ["y"], "refresh"),
        (100, True, ["perhaps", "YES"], "refresh"),
        (100, True, ["n"], "once"),
        (100, True, ["what?", "no"], "once"),
        (100, True, [KeyboardInterrupt], "once"),
        (10_000, True, [], "refresh"),  # a short reading is not asked about
        (100, False, [], "refresh"),  # nor is a pipe, whose lines are questions
    ],
)
def test_a_long_reading_is_asked_about_once(
    limit: int,
    typed: bool,
    answers: list[str | type[BaseException]],
    later: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(minikv.cli.chat.command, "LONG", limit)
    session = chat(reuse="auto")
    taken = talk(session, ["Who?", "n", *answers, "And?"], typed=typed)
    assert taken == 3 + sum(isinstance(answer, str) for answer in answers)
    assert modes(session) == ["once", later, later]
    assert [turn.question for turn in session.turns] == ["Who?", "n", "And?"]
    err = capsys.readouterr().err
    assert err.count("tokens are read again, now and for each later") == bool(answers)
    assert ("may miss what question 1 did not need" in err) or not answers


def test_ctrl_c_while_reading_again_answers_from_the_cache(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = chat(reuse="auto")
    engine: Any = session.engine
    prompt, pressed = engine.prompt, []

    def pressing(ids: list[int], *how: Any) -> Any:
        if session.rereading and not pressed:
            pressed.append(len(ids))
            signal.raise_signal(signal.SIGINT)
        return prompt(ids, *how)

    monkeypatch.setattr(engine, "prompt", pressing)
    talk(session, ["Who?", "Why?", "And?"])
    assert pressed
    assert modes(session) == ["once", "once", "refresh"]
    err = capsys.readouterr().err
    assert "stopped reading again: this answer comes from the cache as it is" in err
    assert err.count("may miss what question 1 did not need") == 1
