"""A copy of a chat between two turns, for `undo` and saved chats."""

from __future__ import annotations

from dataclasses import dataclass

from minikv.cache.snapshot import CacheSnapshot
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.protocols import Template
from minikv.chat.transcript import Document, Message, Turn


@dataclass(frozen=True, slots=True, eq=False)
class ChatSnapshot:
    """A chat between two turns. held: its cache; None if the next question reads the whole
    conversation again, or recalls it from the tier. The other fields are those of `ChatSession`."""

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

    def before(self, finished: int, template: Template) -> ChatSnapshot:
        """The chat after its first `finished` turns, without its cache. The documents of the turn
        after these are pending for the next question."""
        turns = self.turns[:finished]
        return ChatSnapshot(
            None,
            self.eviction,
            self.seed,
            self.messages[: self._message(finished)],
            tuple(document for turn in turns for document in turn.documents),
            self.turns[finished].documents,
            turns=turns,
            curve=self.curve[: 2 * finished],
            known=self._tokens(finished, template),
        )

    def _message(self, finished: int) -> int:
        """The index of the question that comes after the first `finished` turns."""
        return len(self.messages) - 2 * (len(self.turns) - finished)

    def _tokens(self, finished: int, template: Template) -> tuple[int, ...]:
        """The tokens of the conversation after its first `finished` turns, with the pending token
        if there was one. Empty if it is not clear where the later turns begin."""
        if not finished:
            return ()
        messages = list(self.messages[: self._message(finished) + 1])
        after = tuple(template.following(messages))
        ids, seen = self.fed or self.known, self.turns[finished - 1].report.tokens.seen_total
        ends = [end for end in (seen, seen + 1) if ids[end : end + len(after)] == after]
        return ids[: ends[0]] if ends else ()
