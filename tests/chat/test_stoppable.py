"""Work in a library is left when Ctrl-C comes."""

from __future__ import annotations

import atexit
import os
import threading

import pytest

from minikv.chat.stoppable import left, stoppable
from minikv.errors import Interrupted


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
