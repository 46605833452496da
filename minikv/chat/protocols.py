"""What a chat needs of a tokenizer and of a chat template; `minikv.models` has both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol


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
