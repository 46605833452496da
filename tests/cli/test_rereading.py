"""--reuse auto on a terminal: asked once about a long reading, and Ctrl-C answers without it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from small_chat import chat

import minikv.cli.chat
from minikv.chat.session import ChatSession
from minikv.cli.chat import converse
from minikv.cli.command import Context
from minikv.cli.interrupt import Interrupts
from minikv.cli.saved.keeper import Keeper
from minikv.cli.screen.terminal import Terminal
from minikv.settings import Generation

MILL = "A mill stands by the river and grinds. " * 8


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[ChatSession, int]]:
    """A chat in which these lines come in; how many of them were taken."""

    def run(
        lines: Sequence[str | type[BaseException]], limit: int, *, typed: bool = True
    ) -> tuple[ChatSession, int]:
        monkeypatch.setattr(minikv.cli.chat, "LONG", limit)
        session, terminal, taken = chat(reuse="auto"), Terminal(), 0
        session.attach(MILL)
        keeper = Keeper(terminal, active=False)
        generation = Generation(max_tokens=4)
        context = Context(session, terminal, "strict", generation, Interrupts(), keeper)
        coming: Iterator[str | type[BaseException]] = iter(lines)

        def read_line() -> str:
            nonlocal taken
            line = next(coming, EOFError)
            if isinstance(line, str):
                taken += 1
                return line
            raise line

        assert converse(context, read_line, typed=typed) == 0
        return session, taken

    return run


def modes(session: ChatSession) -> list[str]:
    return [report.reuse for report in session.reports]


@pytest.mark.parametrize(
    ("answers", "later"),
    [
        ([""], "refresh"),
        (["y"], "refresh"),
        (["perhaps", "YES"], "refresh"),
        (["n"], "once"),
        (["what?", "no"], "once"),
        ([KeyboardInterrupt], "once"),
    ],
)
def test_a_long_reading_is_asked_about_once(
    talk: Any,
    answers: list[str | type[BaseException]],
    later: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    session, _ = talk(["Who?", "Why?", *answers, "And?"], 100)
    assert modes(session) == ["once", later, later]
    assert [turn.question for turn in session.turns] == ["Who?", "Why?", "And?"]
    err = capsys.readouterr().err
    assert err.count("tokens are read again, and so for each later") == 1
    assert "may miss what question 1 did not need" in err


def test_a_short_reading_is_not_asked_about(talk: Any) -> None:
    session, taken = talk(["Who?", "Why?"], 10_000)
    assert (modes(session), taken) == (["once", "refresh"], 2)


def test_piped_questions_are_never_taken_for_an_answer(talk: Any) -> None:
    session, taken = talk(["Who?", "n", "And?"], 100, typed=False)
    assert [turn.question for turn in session.turns] == ["Who?", "n", "And?"]
    assert (modes(session), taken) == (["once", "refresh", "refresh"], 3)


def test_ctrl_c_while_reading_again_answers_from_the_cache(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = chat(reuse="auto")
    session.attach(MILL)
    terminal = Terminal()
    context = Context(
        session, terminal, "strict", Generation(max_tokens=4), Interrupts(),
        Keeper(terminal, active=False),
    )  # fmt: skip
    engine: Any = session.engine
    prompt, pressed = engine.prompt, []

    def pressing(ids: list[int], *how: Any) -> Any:
        if session.rereading and not pressed:
            pressed.append(len(ids))
            signal.raise_signal(signal.SIGINT)
        return prompt(ids, *how)

    monkeypatch.setattr(engine, "prompt", pressing)
    lines = iter(["Who?", "Why?", "And?"])

    def read_line() -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    assert converse(context, read_line, typed=True) == 0
    assert pressed
    assert modes(session) == ["once", "once", "refresh"]
    err = capsys.readouterr().err
    assert "stopped reading again: this answer comes from the cache as it is" in err
    assert err.count("may miss what question 1 did not need") == 1
