"""A chat between two turns, set aside: what `undo` and saved chats go back to."""

from __future__ import annotations

from dataclasses import dataclass

from minikv.cache.snapshot import CacheSnapshot
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.transcript import Document, Message, Turn


@dataclass(frozen=True, slots=True, eq=False)
class ChatSnapshot:
    """A chat between two turns. `held` None: nothing of it is in a cache, and the next question
    reads the whole conversation again. The other fields are the session's own."""

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

    @property
    def nbytes(self) -> int:
        """Bytes of the copied cache."""
        return 0 if self.held is None else self.held.nbytes
