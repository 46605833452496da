"""Chats over fakes: token log, transcript and cache positions agree after everything."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import BOS, END, ROLES, ByteTokenizer, ChatML, FakeEngine
from refusals import refused
from small_chat import chat_over, reported

from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.errors import NumericsError, UsageError


def make(max_context: int = 4096, **given: Any) -> ChatSession:
    tokenizer = ByteTokenizer()
    template = ChatML(tokenizer, given.pop("notes", ()))
    engine = given.pop("engine", None) or FakeEngine()
    return chat_over(engine, tokenizer, template, max_context=max_context, **given)


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


def test_turns_keep_log_transcript_and_cache_together() -> None:
    chat = make(system="be brief")
    chat.attach("a long story", "story.txt")
    first = "".join(chat.ask("who?"))
    check(chat)
    second = "".join(chat.ask("why?"))
    check(chat)
    assert len(first) == len(second) == 12
    assert first != second
    assert [m.role for m in chat.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert chat.messages[1].content == "Document: story.txt\n\na long story\n\nwho?"
    assert chat.messages[3].content == "why?"


def test_document_without_a_name_has_no_heading() -> None:
    chat = make()
    chat.attach("text")
    list(chat.ask("q"))
    assert chat.messages[0].content == "text\n\nq"


def test_the_unfed_last_token_leads_the_next_prompt() -> None:
    chat = make()
    "".join(chat.ask("one", max_tokens=5))
    assert reported(chat).stop_reason == "length"
    assert chat.pending_token is not None
    assert len(chat.fed) == len("one") + 4 + 4  # bos, user, end, assistant; 4 of 5 answer tokens
    check(chat)
    list(chat.ask("two"))
    check(chat)
    # A chat that had always known the cut answer would have fed the very same tokens.
    again = make()
    assert chat.fed[: len(again.template.opening(chat.messages[:3]))] == again.template.opening(
        chat.messages[:3]
    )


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


def test_reset_forgets_and_clear_keeps_the_documents() -> None:
    chat, fresh = make(system="s"), make(system="s")
    chat.attach("doc", "d")
    list(chat.ask("a"))
    chat.reset(keep_documents=True)
    assert [d.name for d in chat.pending] == ["d"]
    assert chat.report is None
    check(chat)
    fresh.attach("doc", "d")
    assert "".join(chat.ask("b")) == "".join(fresh.ask("b"))
    chat.reset()
    assert chat.pending == []
    check(chat)


def test_configure_checks_before_it_changes_anything() -> None:
    chat = make()
    chat.configure(EvictionConfig.read("full"))
    assert chat.eviction.policy == "full"
    assert chat.engine.kv.configured[-1].budget is None  # type: ignore[attr-defined]
    refused("smallest useful", chat.configure, EvictionConfig.read("streaming", budget=5))
    assert chat.eviction.policy == "full"


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"question": "  "}, "question is empty"),
        ({"max_tokens": 0}, "`max_tokens`"),
        *(({"temperature": wrong}, "`temperature`") for wrong in (-1.0, float("nan"))),
        ({"top_p": 1.5}, "`top_p`"),
        ({"top_k": -1}, "between 0 and 2,147,483,648, got -1"),
        ({"question": "\udce9"}, "not valid Unicode"),
    ],
)
def test_bad_arguments_change_nothing(arguments: dict[str, Any], match: str) -> None:
    chat = make()
    refused(match, chat.ask, **{"question": "q"} | arguments)  # at once, not with a piece
    check(chat)
    assert chat.turn == 0


@pytest.mark.parametrize("text", ["", " \n\t "])
def test_an_empty_document_is_refused(text: str) -> None:
    refused(r"e\.txt is empty", make().attach, text, "e.txt")
