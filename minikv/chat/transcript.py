"""A conversation as plain values: messages, documents and turns; the tokens that the cache has seen
(`TokenLog`) and those of the tier (`Stored`); the values of `reuse`; and protocols for the
tokenizer and the chat template, which `minikv.models` implements.

A policy that scores with the question keeps what that question needs, so a later question may lack
rows (FasterDecoding/SnapKV#18: "compress individually for different turns"). `refresh` reads the
whole conversation again with each question. `once` continues with the cache of the first question.
`blind` evicts a document before it reads a question about it, as kvpress measures. `recall` answers
each question from the tier (`minikv.cache.tier`), as the first one was answered, without reading
again. `auto` is `blind` if the policy has a second pass, so that one cache serves all questions;
else `recall` if there is a tier; else `refresh` if the policy scores with the question; else
`once`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from minikv.chat.report import TurnReport
from minikv.chat.thoughts import Tags
from minikv.errors import UsageError

REUSES = ("auto", "recall", "refresh", "once", "blind")
OVERFLOWS = ("refuse", "drop")
TIERS = ("auto", "ram", "file", "none")
TIER_DTYPES = ("same", "int8")
_BLOCK = 4096  # tokens


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the conversation. role: "system", "user" or "assistant". thoughts: those that
    precede the answer `content`."""

    role: str
    content: str
    thoughts: str = ""


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
    """A question with its documents, and the answer as far as it was written. thoughts: what the
    model wrote between its tags before the answer."""

    question: str
    answer: str
    documents: tuple[Document, ...]
    report: TurnReport
    thoughts: str = ""

    def messages(self) -> tuple[Message, Message]:
        """The turn as two messages of the conversation."""
        answer = Message("assistant", self.answer, self.thoughts)
        return user_message(self.documents, self.question), answer


def system_messages(system: str) -> tuple[Message, ...]:
    """The first messages of a conversation with this system prompt; none if it is empty."""
    return (Message("system", system),) if system else ()


def said(before: Iterable[Message], turns: Iterable[Turn]) -> list[Message]:
    """The messages of a conversation. before: those before its turns."""
    return [*before, *(message for turn in turns for message in turn.messages())]


def rendered(documents: Iterable[Document]) -> str:
    """The documents as part of the user message."""
    return "".join(document.rendered() for document in documents)


def user_message(documents: Iterable[Document], question: str) -> Message:
    return Message("user", rendered(documents) + question)


# -- tokens --------------------------------------------------------------------------------------


class OneOf:
    """An attribute that is one of these texts. Setting another value raises UsageError."""

    def __init__(self, values: Sequence[str]) -> None:
        self._values = values

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: type) -> str:
        return str(owner.__dict__[self._name])

    def __set__(self, owner: Any, value: str) -> None:
        if value not in self._values:
            some = ", ".join(self._values)
            raise UsageError(f"{self._name} must be one of {some}, got {value!r}")
        owner.__dict__[self._name] = value


def shared(*runs: Sequence[object]) -> int:
    """The length of the longest common prefix."""
    least, at = min(map(len, runs)), 0
    while at < least:  # whole blocks at once: conversations have up to a million tokens
        first, *others = (list(run[at : min(at + _BLOCK, least)]) for run in runs)
        if any(other != first for other in others):
            columns = enumerate(zip(first, *others, strict=True))
            return at + next(i for i, column in columns if len(set(column)) > 1)
        at += _BLOCK
    return least


@dataclass(frozen=True, slots=True)
class Stored:
    """The contents of the tier, and whether it may be used.

    ids: the tokens whose keys and values are in it. room: whether the next question may be answered
    from it, and the whole conversation fits into it. why: why not. kind: one of `TIERS`. least and
    chunk: at least the last `least` tokens are always read, starting at a multiple of `chunk`.
    """

    ids: Sequence[int] = ()
    room: bool = False
    why: str = ""
    kind: str = "none"
    least: int = 0
    chunk: int = 1

    def gives(self, ids: Sequence[int]) -> int:
        """How many of the first tokens of `ids` need not be read."""
        have = min(shared(self.ids, ids), max(0, len(ids) - self.least))
        return have - have % self.chunk


class TokenLog:
    """The tokens of a conversation. ids: as far as they are known. seen: how many of them the cache
    has seen. cut: they do not end with an answer, so the template continues them differently. Each
    change is one assignment or one call, so that no interrupt can split it.

    However a turn ends, the cache has seen exactly the tokens in `fed`. The last token of an answer
    was sampled but not fed to the network. A stop token is never fed, because the template puts it
    at the start of the next turn. Any other last token is the pending token, which begins the next
    prompt.
    """

    def __init__(self, ids: Iterable[int] = (), seen: int = 0, *, cut: bool = False) -> None:
        self.ids, self.seen, self.cut = list(ids), seen, cut

    @property
    def fed(self) -> list[int]:
        """The tokens that the cache has seen."""
        return self.ids[: self.seen]

    @property
    def pending(self) -> int | None:
        """The pending token; None if there is none."""
        return self.ids[self.seen] if 0 < self.seen < len(self.ids) else None

    @pending.setter
    def pending(self, token: int | None) -> None:
        self.ids[self.seen :] = [] if token is None else [token]

    @property
    def known(self) -> list[int]:
        """See `ChatSession`."""
        return [] if self.seen else self.ids

    @property
    def unfed(self) -> list[int]:
        """The tokens with which the next prompt begins: the pending token, if there is one."""
        return [] if self.pending is None else [self.pending]

    def read(self, ids: Iterable[int], anew: bool) -> TokenLog:
        """The log after a prompt was read, following the tokens that the cache had seen, or, with
        `anew`, replacing them."""
        whole = [*(() if anew else self.fed), *ids]
        return TokenLog(whole, len(whole))

    def step(self, position: int) -> bool:
        """If the cache's position says that the pending token was fed, note it. Returns whether it
        was."""
        fed = self.pending is not None and position == self.seen + 1
        if fed:
            self.seen = position
        return fed


# -- what makes tokens of text ------------------------------------------------------------------


class TextStream(Protocol):
    """Turns token ids into text one by one. Holds back incomplete characters until `flush`."""

    def push(self, token: int) -> str: ...
    def flush(self) -> str: ...


class Tokenizer(Protocol):
    """What a session needs from a tokenizer; `minikv.models.tokenizer.Tokenizer` implements it."""

    @property
    def vocab(self) -> int: ...
    @property
    def stop_ids(self) -> frozenset[int]: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Iterable[int]) -> str: ...
    def sentence_ends(self, ids: Sequence[int]) -> list[bool]: ...
    def stream(self) -> TextStream: ...


class Template(Protocol):
    """What a session needs from a chat template. Messages have `.role`, `.content` and `.thoughts`.

    `opening` renders a whole conversation that ends with a user message. `following` renders what
    comes after the text of the last assistant message, beginning with its end-of-turn marker. Both
    end where the answer begins. `tags`: around the model's thoughts; None if it has none. `notes`:
    lines for the user. `lookalikes` and `markers` count
    strings that look like control tokens or turn markers, and `lost` the characters that the
    tokenizer drops or changes.
    """

    @property
    def tags(self) -> Tags | None: ...
    @property
    def notes(self) -> tuple[str, ...]: ...
    # Any: the models package has its own message type, and neither package may import the other's.
    def opening(self, messages: Sequence[Any]) -> list[int]: ...
    def following(self, messages: Sequence[Any]) -> list[int]: ...
    def lookalikes(self, text: str) -> int: ...
    def markers(self, text: str) -> int: ...
    def lost(self, text: str) -> int: ...
