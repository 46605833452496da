"""All that a turn changes in a chat. It is replaced as a whole, by one assignment, so that an
interrupt finds it as it was before the turn or as it is after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from minikv.cache.stats import CacheStats
from minikv.chat.token_log import TokenLog
from minikv.chat.transcript import Document, Message, Turn
from minikv.chat.undo import UndoHistory


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation; see `ChatSession` for what is not described here.

    number: counts the conversations of a chat. turn: the number of the last question that was read;
    0 before the first. closing(): the conversation after the turn under way, however that ended; it
    changes nothing, so it may be called again. None between turns.
    """

    number: int
    history: UndoHistory
    messages: list[Message]
    pending: list[Document] = field(default_factory=list)
    documents: list[Document] = field(default_factory=list)
    log: TokenLog = field(default_factory=TokenLog)
    turn: int = 0
    turns: list[Turn] = field(default_factory=list)
    undone: list[Turn] = field(default_factory=list)
    curve: list[tuple[int, int, int]] = field(default_factory=list)
    shaped_by: int | None = None
    rereads: bool = False
    closing: Callable[[], Conversation] | None = None

    def closed(self, turns: list[Turn], stats: CacheStats, here: int) -> Conversation:
        """The conversation after these turns, the last of which was under way. stats: of the cache
        then. here: bytes of the tier in the cache's own memory."""
        return replace(
            self,
            messages=[*self.messages, Message("assistant", turns[-1].answer)],
            turns=turns,
            curve=[*self.curve, mark(stats, here)],
            closing=None,
        )


def mark(stats: CacheStats, here: int) -> tuple[int, int, int]:
    """A point of `ChatSession.curve`. here: bytes of the tier in the cache's own memory."""
    return stats.seen, stats.held_bytes + here, stats.full_bytes
