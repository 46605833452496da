"""Turn an item's document and question into a prompt: as a chat does, or without any addition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from minikv.chat import plan
from minikv.chat.session import ChatSession
from minikv.chat.transcript import Document, Message, Template
from minikv.cli.eval.files import Item
from minikv.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class _Bare(Document):
    """A document that is rendered without its name and without anything after it."""

    def rendered(self) -> str:
        return self.text


def document(item: Item) -> Document:
    """The item's document as it stands in front of a question."""
    return _Bare(item.document) if item.name is None else Document(item.document, item.name)


class _Completion:
    """A `Template` without roles: the prompt is the text alone, and the answer continues it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.notes: tuple[str, ...] = ()

    def opening(self, messages: Sequence[Any]) -> list[int]:
        start = [id for id, _ in self._tokenizer.split(self._tokenizer.start) if id is not None]
        text = "".join(message.content for message in messages)
        return start + self._tokenizer.encode(text, "after" if start else "start")

    def following(self, messages: Sequence[Any]) -> list[int]:
        return self._tokenizer.encode(messages[-1].content, "inside")

    def lookalikes(self, text: str) -> int:
        return 0

    def markers(self, text: str) -> int:
        return 0

    def lost(self, text: str) -> int:
        return 0


class _Begun:
    """A `Template` that adds the beginning of the answer to its prompts."""

    def __init__(self, template: Template, begins: list[int]) -> None:
        self._template, self._begins = template, begins
        self.notes = template.notes
        self.lookalikes, self.markers = template.lookalikes, template.markers
        self.lost = template.lost

    def opening(self, messages: Sequence[Any]) -> list[int]:
        return self._template.opening(messages) + self._begins

    def following(self, messages: Sequence[Any]) -> list[int]:
        return self._template.following(messages) + self._begins


@contextmanager
def worded(chat: ChatSession, item: Item, number: int) -> Iterator[None]:
    """Inside, the chat writes its prompts in the way that question `number` of the item needs."""
    before = chat.template
    tokenizer = cast(Tokenizer, chat.tokenizer)
    template = before if item.roles else _Completion(tokenizer)
    if item.opens:
        template = _Begun(template, tokenizer.encode(item.opens[number], "inside"))
    chat.template = template
    try:
        yield
    finally:
        chat.template = before


def opening(chat: ChatSession, item: Item, number: int) -> list[int]:
    """The prompt with the document and a question, as the first of a chat."""
    with worded(chat, item, number):
        asked = item.questions[number] if number else item.opening
        content = document(item).rendered() + asked
        return chat.template.opening([*chat.messages, Message("user", content)])


def parts(chat: ChatSession, item: Item, number: int) -> tuple[list[int], ...]:
    """That prompt, cut where the chat evicts before it sees the question."""
    ids = opening(chat, item, number)
    if chat.reuse != "blind":
        return (ids,)
    with worded(chat, item, number):
        messages = [*chat.messages, Message("user", "")]
        asked = [(len(chat.messages), document(item).rendered())]
        return plan.parts(ids, asked, chat.template.opening, messages)
