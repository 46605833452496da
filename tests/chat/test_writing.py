"""An answer while it is written: whatever fails, what was written stays and is in the log."""

from __future__ import annotations

import pytest
from fakes import ByteStream, FakeEngine
from test_session import check, make

from minikv.errors import NumericsError


def test_nan_in_an_answer_stops_it_and_keeps_what_was_written() -> None:
    engine = FakeEngine()
    chat = make(engine=engine)
    engine.nan_at = len("q") + 4 + 3
    pieces: list[str] = []
    with pytest.raises(NumericsError):
        pieces.extend(chat.ask("q"))
    assert len(pieces) == 3
    assert chat.report is not None
    assert chat.report.stop_reason == "error"
    assert chat.messages[-1].content == "".join(pieces)
    engine.nan_at = None
    check(chat)
    list(chat.ask("next"))
    check(chat)


def test_a_character_over_several_tokens_arrives_whole() -> None:
    engine = FakeEngine(length=5)
    engine.script = [*"aé".encode(), 0xE2, 0x82]
    chat = make(engine=engine)
    pieces = list(chat.ask("q"))
    assert pieces == ["a", "é", "\ufffd"]  # the unfinished one is flushed at the end
    assert chat.messages[-1].content == "aé\ufffd"


def test_a_token_whose_text_cannot_be_had_is_not_in_the_conversation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chat = make()

    class Broken(ByteStream):
        def push(self, token: int) -> str:
            if len(chat.fed) > 12:
                raise RuntimeError("no text")
            return super().push(token)

    monkeypatch.setattr(chat.tokenizer, "stream", Broken)
    with pytest.raises(RuntimeError, match="no text"):
        list(chat.ask("q"))
    report = chat.report
    assert report is not None
    assert report.tokens.generated > 0
    assert chat.pending_token is None
    assert len(chat.tokenizer.encode(chat.turns[0].answer)) == report.tokens.generated
    check(chat)
