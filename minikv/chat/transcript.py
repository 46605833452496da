"""What was said: messages, documents and turns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from minikv.chat.report import TurnReport


@dataclass(frozen=True, slots=True)
class Message:
    """One entry of the transcript; `role` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Document:
    """A text that the next question is asked about."""

    text: str
    name: str | None = None

    def rendered(self) -> str:
        """As it stands in the user message, before the question."""
        return f"Document: {self.name}\n\n{self.text}\n\n" if self.name else f"{self.text}\n\n"


@dataclass(frozen=True, slots=True)
class Turn:
    """A question that was read, with its documents, and the answer as far as it was written."""

    question: str
    answer: str
    documents: tuple[Document, ...]
    report: TurnReport

    def messages(self) -> tuple[Message, Message]:
        """As the transcript has it."""
        return user_message(self.documents, self.question), Message("assistant", self.answer)


def user_message(documents: Iterable[Document], question: str) -> Message:
    return Message("user", "".join(d.rendered() for d in documents) + question)
