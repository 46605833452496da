"""An interrupt may come between any two instructions, as Ctrl-C does in a script. Whenever it does,
messages, turns, tokens, cache and tier agree, the chat is free, and undo and save work."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from tensors import torch_threads
from test_machine import Setting, eviction
from whole import whole

from minikv.chat.session import ChatSession
from minikv.cli.saved.keeper import Keeper
from minikv.cli.saved.transcript import read
from minikv.cli.screen.terminal import Terminal

SETTINGS = {
    "no tier": Setting(eviction(("adakv", "auto"), 48)),
    "tier": Setting(eviction(("adakv", "auto"), 48), "ram", reuse="auto"),
}
OPERATIONS: dict[str, Callable[[ChatSession], object]] = {
    "ask": lambda chat: "".join(chat.ask("and now?", 3, 0.8)),
    "stop text": lambda chat: "".join(chat.ask("and now?", 9, 0.8, stop=["a", "e", "i", "o"])),
    "continue": lambda chat: "".join(chat.continue_answer(2, 0.8)),
    "undo": lambda chat: chat.undo(),
    "reset": lambda chat: chat.reset(keep_documents=True),
    "attach": lambda chat: chat.attach("the river is slow.", "more.txt"),
}
_CHAT = "session turn stopping closing snapshot transcript answer recall reading plan".split()
FILES = (
    *(os.path.join("minikv", "chat", f"{name}.py") for name in _CHAT),
    *(os.path.join("minikv", "cache", f"{name}.py") for name in ("kv_cache", "tier")),
)
CLOSING = {"closing", "ended", "turn_report", "measured", "closed", "_settle", "settle", "_end"}


class At:
    """A trace function that raises KeyboardInterrupt before the `at`-th line of `FILES`, or only of
    these functions of them. where: the line; "" if there are fewer."""

    def __init__(self, at: int, only: set[str] | None = None) -> None:
        self._left, self._only = at, only
        self.where = ""

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        wanted = self._only is None or code.co_name in self._only
        return self._line if wanted and code.co_filename.endswith(FILES) else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            self._left -= 1
            if not self._left:
                self.where = f"{frame.f_code.co_name}, line {frame.f_lineno}"
                raise KeyboardInterrupt
        return self._line


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


def made(setting: str) -> ChatSession:
    chat = SETTINGS[setting].chat()
    chat.attach("a story of a crane and a tiger. ", "story.txt")
    "".join(chat.ask("what?", 3))
    return chat


def sound(chat: ChatSession, name: str) -> None:
    """All of it agrees now, after the next question, when that is undone, and on disk."""
    whole(chat)
    questions = [turn.question for turn in chat.turns]
    "".join(chat.ask("the last?", 2))
    whole(chat)
    keeper = Keeper(Terminal(quiet=True))
    keeper.save(chat, name)
    keeper.close()
    assert [turn.question for turn in read(name).turns] == [*questions, "the last?"]
    assert [turn.question for turn in chat.undo()] == ["the last?"]
    whole(chat)
    assert [turn.question for turn in chat.turns] == questions


def interrupted(chat: ChatSession, operation: Callable[[ChatSession], object], at: At) -> None:
    before = sys.gettrace()
    sys.settrace(at)
    try:
        operation(chat)
    except (KeyboardInterrupt, ZeroDivisionError):
        pass
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupt_at_any_line(name: str, setting: str, part: float) -> None:
    """By day at some of the lines that are run, others in each case."""
    case = [*OPERATIONS].index(name) * 2 + [*SETTINGS].index(setting)
    step, came = (1 if part == 1 else 83), 0
    for at in itertools.count(1 + 3 * case % step, step):
        chat, interrupt = made(setting), At(at)
        interrupted(chat, OPERATIONS[name], interrupt)
        if not interrupt.where:
            break
        came += 1
        try:
            sound(chat, f"{case}-{at}")
        except BaseException as error:
            error.add_note(interrupt.where)
            raise
    assert came


@pytest.mark.parametrize("fails", [False, True])
def test_an_interrupt_at_every_line_of_closing_a_turn(fails: bool, part: float) -> None:
    """Also after a step that failed: then one record says that nothing is cached. By day every
    third line."""
    for at in itertools.count(1 + fails, 1 if part == 1 else 3):
        chat, interrupt, failed = made("no tier"), At(at, CLOSING), []

        def fail(failed: list[int] = failed) -> None:
            failed.append(1)
            raise ZeroDivisionError

        with pytest.MonkeyPatch.context() as patch:
            if fails:
                patch.setattr(chat.engine.kv.decode, "end", fail)
            interrupted(chat, OPERATIONS["ask"], interrupt)
        if not interrupt.where:
            break
        try:
            whole(chat)
            last = chat.turns[-1].question
            if fails and last == "and now?":
                "".join(chat.ask("more?", 2))
                said = [line for report in chat.reports for line in report.warnings]
                # An interrupt may come after the reading and before the first step.
                assert sum("a step failed" in line for line in said) == len(failed)
                assert chat.turns[-1].question == "more?"
                chat.undo()
            assert [turn.question for turn in chat.undo()] == [last]
            whole(chat)
        except BaseException as error:
            error.add_note(interrupt.where)
            raise
    assert at > 100


def signals(count: int, seed: int) -> int:
    """Real signals at random moments of a turn; returns how many came before its end."""
    draw, came, chat = random.Random(seed), 0, made("no tier")
    for number in range(count):
        if chat.room < 200:
            chat = made("no tier")
        turns = len(chat.turns)
        seconds = draw.uniform(0.0, 0.04)
        pressed = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
        try:
            pressed.start()
            "".join(chat.ask(f"and {number}?", 6))
            pressed.join()
        except KeyboardInterrupt:
            came += chat.report is None or chat.report.stop_reason == "error"
        pressed.join()
        whole(chat)
        assert turns <= len(chat.turns) <= turns + 1
    sound(chat, f"signals-{seed}")
    return came


def test_signals_at_random_moments() -> None:
    assert signals(40, 1)


@pytest.mark.soak
def test_many_signals_at_random_moments() -> None:
    assert signals(1000, 2)
