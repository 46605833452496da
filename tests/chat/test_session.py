"""Chats over fakes: token log, transcript and cache positions agree after everything."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import BOS, END, ROLES, ByteTokenizer, ChatML, FakeEngine
from small_chat import chat_over

from minikv.chat.session import ChatSession
from minikv.errors import NumericsError, UsageError


def make(max_context: int = 4096, **given: Any) -> ChatSession:
    tokenizer = ByteTokenizer()
    template = ChatML(tokenizer, given.pop("notes", ()))
    return chat_over(
        given.pop("engine", None) or FakeEngine(),
        tokenizer,
        template,  # type: ignore[arg-type]
        max_context=max_context,
        **given,
    )


def check(chat: ChatSession) -> None:
    """Fed tokens, what the engine took, cache positions and the transcript are one and the same."""
    assert chat.engine.fed == chat.fed  # type: ignore[attr-defined]
    assert chat.engine.kv.position == len(chat.fed)
    if not chat.fed:
        assert [m.role for m in chat.messages] in ([], ["system"])
        return
    pending_token = [] if chat.pending_token is None else [chat.pending_token]
    written = [BOS]
    for message in chat.messages:
        written += [ROLES[message.role], *message.content.encode(), END]
    assert written == [*chat.fed, *pending_token, END]


def test_document_without_a_name_has_no_heading() -> None:
    chat = make()
    chat.attach("text")
    list(chat.ask("q"))
    assert chat.messages[0].content == "text\n\nq"


def test_what_is_to_go_on_is_looked_at_when_it_begins() -> None:
    chat = make()
    list(chat.ask("q", 3))
    more = chat.continue_answer(3)
    chat.reset()
    with pytest.raises(UsageError):
        list(more)


@pytest.mark.parametrize("reuse", ["once", "refresh"])
def test_nan_in_the_prompt_leaves_the_chat_as_it_was(reuse: str) -> None:
    engine = FakeEngine()
    chat = make(engine=engine, reuse=reuse)
    chat.attach("doc")
    list(chat.ask("fine"))
    before, fed, pending = list(chat.messages), list(chat.fed), chat.pending_token
    engine.nan_at = 0
    with pytest.raises(NumericsError):
        list(chat.ask("broken"))
    assert (chat.messages, chat.fed, chat.pending_token) == (before, fed, pending)
    check(chat)
