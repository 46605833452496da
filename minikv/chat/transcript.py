"""Messages, documents and turns of a conversation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from minikv.chat.report import TurnReport


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the conversation. role: "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Source:
    """The file that a document was read from, as it was then. size: bytes. sha256: of its bytes, in
    hexadecimal."""

    path: str
    size: int
    mtime_ns: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Document:
    """A text to ask about. It is put before the next question. Documents that differ only in
    `source` are equal."""

    text: str
    name: str | None = None
    source: Source | None = field(default=None, compare=False)

    def rendered(self) -> str:
        """The document as part of the user message, before the question."""
        return f"Document: {self.name}\n\n{self.text}\n\n" if self.name else f"{self.text}\n\n"


@dataclass(frozen=True, slots=True)
class Turn:
    """A question with its documents, and the answer as far as it was written."""

    question: str
    answer: str
    documents: tuple[Document, ...]
    report: TurnReport

    def messages(self) -> tuple[Message, Message]:
        """The turn as two messages of the conversation."""
        return user_message(self.documents, self.question), Message("assistant", self.answer)


def said(system: str, turns: Iterable[Turn]) -> list[Message]:
    """The messages of a conversation that begins with this system prompt, or with none."""
    opening = [Message("system", system)] if system else []
    return [*opening, *(message for turn in turns for message in turn.messages())]


def rendered(documents: Iterable[Document]) -> str:
    """The documents as part of the user message."""
    return "".join(document.rendered() for document in documents)


def user_message(documents: Iterable[Document], question: str) -> Message:
    return Message("user", rendered(documents) + question)
