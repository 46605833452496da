"""A long text is tokenized so that it can be stopped, and only where memory suffices."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from small_chat import chat

from minikv.chat import composing
from minikv.errors import Interrupted, MemoryShortError


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
    monkeypatch.setattr(composing, "_LONG", 1000)
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
