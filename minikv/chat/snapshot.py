"""A copy of a chat between two turns, for `undo` and saved chats."""

from __future__ import annotations

from dataclasses import dataclass

from minikv.cache.snapshot import CacheSnapshot
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.transcript import Document, Message, Turn


@dataclass(frozen=True, slots=True, eq=False)
class ChatSnapshot:
    """A chat between two turns. `held`: its cache; None if the next question reads the whole
    conversation again, or finds it in the tier. The other fields are those of `ChatSession`."""

    held: CacheSnapshot | None
    eviction: EvictionConfig
    seed: int
    messages: tuple[Message, ...] = ()
    documents: tuple[Document, ...] = ()
    pending: tuple[Document, ...] = ()
    fed: tuple[int, ...] = ()
    pending_token: int | None = None
    shaped_by: int | None = None
    turns: tuple[Turn, ...] = ()
    curve: tuple[tuple[int, int, int], ...] = ()
    rereads: bool = False
    known: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the copied cache."""
        return 0 if self.held is None else self.held.nbytes
