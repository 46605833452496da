"""A turn is closed whatever happens."""

from __future__ import annotations

from typing import Any

import pytest
import small_chat
from test_session import make


def test_a_turn_is_closed_before_the_caller_hears_of_it() -> None:
    """A notice that comes during the answer, and a caller that fails on it."""
    session = make()
    session.engine.notices = []

    def fail(line: str) -> None:
        raise BrokenPipeError(line)

    answer = session.ask("who?", max_tokens=3, notice=fail)
    next(answer)
    session.engine.notices.append("steps are slower now")
    with pytest.raises(BrokenPipeError):
        list(answer)
    assert session.turn == len(session.turns) == 1
    assert session.turns[0].report.warnings == ("steps are slower now",)
    session.snapshot()
    assert "".join(session.ask("and then?", max_tokens=3))


def test_a_turn_has_its_two_points_of_the_curve_without_memory_to_count_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chat = small_chat.chat()
    list(chat.ask("one", 3))
    stats, before = chat.engine.kv.stats, len(chat.fed)

    def full() -> Any:
        if len(chat.fed) > before:
            raise MemoryError
        return stats()

    with monkeypatch.context() as patch:
        patch.setattr(chat.engine.kv, "stats", full)
        list(chat.ask("two", 3))
    assert len(chat.curve) == 4
    assert [seen for seen, *_ in chat.curve] == sorted(seen for seen, *_ in chat.curve)
