"""Messages, documents and turns of a conversation; and what a chat needs of a tokenizer and of a
chat template, which `minikv.models` has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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


class TextStream(Protocol):
    """Turns token ids into text one by one. Holds incomplete characters back until `flush`."""

    def push(self, token: int) -> str: ...
    def flush(self) -> str: ...


class Tokenizer(Protocol):
    """What a session needs of a tokenizer; `minikv.models.tokenizer.Tokenizer` has it."""

    @property
    def vocab(self) -> int: ...
    @property
    def stop_ids(self) -> frozenset[int]: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Iterable[int]) -> str: ...
    def stream(self) -> TextStream: ...


class Template(Protocol):
    """What a session needs of a chat template. Messages carry `.role` and `.content`.

    `opening` renders a whole conversation that ends with a user message. `following` renders what
    comes after the text of the last assistant message, beginning with its end-of-turn marker. Both
    end where the answer begins. `notes`: lines for the user. `lookalikes` and `markers` count
    strings that look like control tokens or turn markers, and `lost` the characters that the
    tokenizer drops or changes.
    """

    @property
    def notes(self) -> tuple[str, ...]: ...
    # Any: the models package has its own message type, and neither package may import the other's.
    def opening(self, messages: Sequence[Any]) -> list[int]: ...
    def following(self, messages: Sequence[Any]) -> list[int]: ...
    def lookalikes(self, text: str) -> int: ...
    def markers(self, text: str) -> int: ...
    def lost(self, text: str) -> int: ...
