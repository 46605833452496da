"""A cancel stops the turn it was meant for, and the chat is whole after it."""

from __future__ import annotations

import pytest
from test_session import check, make

from minikv.errors import Interrupted


def test_cancel_in_an_answer_keeps_it_and_the_next_turn_follows() -> None:
    chat = make()
    pieces = []
    for piece in chat.ask("tell me"):
        pieces.append(piece)
        if len(pieces) == 3:
            chat.cancel()
    assert len(pieces) == 3
    assert chat.report is not None
    assert chat.report.stop_reason == "user"
    assert chat.messages[-1].content == "".join(pieces)
    check(chat)
    list(chat.ask("go on"))
    assert chat.report.stop_reason == "eos"
    check(chat)


def test_closing_the_iterator_is_a_cancel() -> None:
    chat = make()
    answer = chat.ask("tell me")
    first = next(answer) + next(answer)
    answer.close()  # type: ignore[attr-defined]
    assert chat.report is not None
    assert chat.report.stop_reason == "user"
    assert chat.messages[-1].content == first
    check(chat)
    list(chat.ask("and now"))
    check(chat)


def test_cancel_while_reading_rolls_back_and_the_documents_stay_pending() -> None:
    chat, twin = make(), make()
    for c in (chat, twin):
        list(c.ask("hello"))
        c.attach("x" * 40, "x.txt")
    calls = 0

    def stop_at_third(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            chat.cancel()

    messages, fed = list(chat.messages), list(chat.fed)
    with pytest.raises(Interrupted, match=r"stopped reading at 12 of \d+ tokens"):
        list(chat.ask("what is x?", progress=stop_at_third))
    assert chat.messages == messages
    assert chat.fed == fed
    assert [d.name for d in chat.pending] == ["x.txt"]
    check(chat)
    assert "".join(chat.ask("what is x?")) == "".join(twin.ask("what is x?"))
    check(chat)


def test_cancel_before_the_first_piece_stops_the_turn() -> None:
    """Ctrl-C between the question and the first look at it is not lost."""
    chat = make()
    answer = chat.ask("q")
    chat.cancel()
    with pytest.raises(Interrupted):
        list(answer)
    assert chat.messages == []
    assert len("".join(chat.ask("q"))) == 12


def test_a_cancel_is_for_the_answer_under_way() -> None:
    """Not for another one that was asked for before it, and not fewer after a reset."""
    chat = make()
    one, other = chat.ask("q"), chat.ask("q")
    next(one)
    chat.cancel()
    list(one)
    assert len("".join(other)) == 12
    for _ in range(3):
        chat.cancel()
    late = chat.ask("q")
    chat.reset()
    next(late)
    chat.cancel()
    assert list(late) == []
    assert chat.report is not None
    assert chat.report.stop_reason == "user"


def test_cancel_outside_a_turn_does_nothing() -> None:
    chat = make()
    chat.cancel()
    assert len("".join(chat.ask("q"))) == 12
