"""Work in a library is left when Ctrl-C comes, and a text is tokenized in such a way."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from small_chat import chat

from minikv.chat import session as session_module
from minikv.chat.stoppable import left, stoppable
from minikv.errors import Interrupted, MemoryShortError


def test_what_the_work_returns_or_raises_comes_out() -> None:
    assert stoppable(lambda: 3, lambda: False) == 3
    with pytest.raises(ZeroDivisionError):
        stoppable(lambda: 1 // 0, lambda: False)


def test_work_that_does_not_end_is_left() -> None:
    never = threading.Event()
    with pytest.raises(Interrupted) as caught:
        stoppable(never.wait, lambda: True)
    assert caught.value.exit_code == 130
    assert left()
    never.set()
    for thread in threading.enumerate():
        if thread.name == "minikv-stoppable":
            thread.join(10)
    assert not left()


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A chat whose tokenizer never comes back from a long text, and stops the chat meanwhile."""
    talk = chat()
    compose, never = talk.template.opening, threading.Event()

    def opening(messages: Sequence[Any]) -> list[int]:
        if len(messages[-1].content) > 1000:
            talk.cancel()
            never.wait()
        return compose(messages)

    monkeypatch.setattr(talk.template, "opening", opening)
    monkeypatch.setattr(session_module, "_LONG", 1000)
    monkeypatch.setattr(talk, "max_context", 1 << 30)
    yield talk
    never.set()


def test_ctrl_c_is_heard_while_a_text_is_tokenized(endless: Any) -> None:
    endless.attach("a mill " * 300)
    with pytest.raises(Interrupted, match="before anything was read"):
        list(endless.ask("What?"))
    assert (endless.turns, endless.fed, len(endless.pending)) == ([], [], 1)


def test_a_text_that_memory_does_not_suffice_for_is_refused(endless: Any) -> None:
    """The library's allocator would end the process."""
    endless.recall._free = lambda: 1000
    endless.attach("a mill " * 300)
    with pytest.raises(MemoryShortError, match="tokenizing") as caught:
        list(endless.ask("What?"))
    assert caught.value.exit_code == 4
    assert len(endless.pending) == 1


def test_the_program_does_not_wait_for_what_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own end took seconds more."""
    from minikv.cli import main

    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: ended.append(-1))
    main._leave_what_goes_on(130)
    assert ended == []
    never = threading.Event()
    with pytest.raises(Interrupted):
        stoppable(never.wait, lambda: True)
    main._leave_what_goes_on(130)
    assert ended == [-1, 130]
    never.set()
