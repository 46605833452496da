"""What a chat needs of a tokenizer and of a chat template; `minikv.models` has both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol


class TextStream(Protocol):
    """Turns token ids into text as they come, holding back incomplete characters."""

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

    `opening` renders a whole conversation that ends with a user message; `following` what comes
    after the last assistant message's text, its end-of-turn marker first. Both end where the
    answer begins.
    """

    @property
    def notes(self) -> tuple[str, ...]: ...
    # Any: the models package has its own message type, and neither package may import the other's.
    def opening(self, messages: Sequence[Any]) -> list[int]: ...
    def following(self, messages: Sequence[Any]) -> list[int]: ...
    def lookalikes(self, text: str) -> int: ...
    def markers(self, text: str) -> int: ...
