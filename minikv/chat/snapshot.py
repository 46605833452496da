"""The state of a chat that a turn changes (`Conversation`), and copies of a chat between two turns
(`ChatSnapshot`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from minikv.cache.snapshot import CacheSnapshot
from minikv.cache.stats import CacheStats
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.report import TurnReport
from minikv.chat.transcript import Document, Message, Template, TokenLog, Turn, said


@dataclass(frozen=True, slots=True, eq=False)
class ChatSnapshot:
    """A chat between two turns.

    held: its cache, which has seen the beginning of its tokens; None if the next question reads the
    whole conversation again, or recalls it from the tier. said: the conversation, which no longer
    changes. The other fields are as in `ChatSession`.
    """

    held: CacheSnapshot | None
    eviction: EvictionConfig
    seed: int
    said: Conversation

    @property
    def nbytes(self) -> int:
        """Bytes of the copied cache."""
        return 0 if self.held is None else self.held.nbytes


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation; see `ChatSession` for the fields that are not described here. It is replaced
    as a whole, by one assignment, so that an interrupt finds either the state before the turn or
    the state after it.

    conversation: counts the conversations of a chat. opened_with: the messages before its turns:
    the system prompt, or those of `follow`. log: its tokens, as far as they are known. asked: the
    turn under way, once its question was read; its record has no answer yet. noticed: how many
    notices of the engine the user has seen. closing(): the conversation after the turn under way,
    however that ended; it has no side effects, so it may be called again. None between turns.
    """

    conversation: int = 0
    opened_with: tuple[Message, ...] = ()
    turns: list[Turn] = field(default_factory=list)
    pending: list[Document] = field(default_factory=list)
    log: TokenLog = field(default_factory=TokenLog)
    curve: list[tuple[int, int, int]] = field(default_factory=list)
    rereads: bool = False
    asked: Turn | None = None
    undone: list[Turn] = field(default_factory=list)
    noticed: int = 0
    closing: Callable[[], Conversation] | None = None

    @property
    def _begun(self) -> list[Turn]:
        return self.turns if self.asked is None else [*self.turns, self.asked]

    @property
    def turn(self) -> int:
        """The number of the last question that was read; 0 before the first."""
        return len(self._begun)

    @property
    def documents(self) -> list[Document]:
        """Documents that came with a question."""
        return [document for turn in self._begun for document in turn.documents]

    @property
    def messages(self) -> list[Message]:
        """The conversation, with the question that is being answered."""
        messages = said(self.opened_with, self._begun)
        return messages if self.asked is None else messages[:-1]

    @property
    def reports(self) -> list[TurnReport]:
        """The records of all finished turns."""
        return [turn.report for turn in self.turns]

    @property
    def report(self) -> TurnReport | None:
        """The record of the last turn; None if there is none."""
        return self.turns[-1].report if self.turns else None

    @property
    def evicted_for_turn(self) -> int | None:
        """The record of the last question says for which one the cache was evicted."""
        return self._begun[-1].report.shaped_by_turn if self._begun and self.log.seen else None

    def copied(self) -> Conversation:
        """A copy of this conversation between two turns, for an empty cache."""
        return Conversation(
            self.conversation,
            self.opened_with,
            list(self.turns),
            list(self.pending),
            TokenLog(self.log.ids),
            list(self.curve),
            self.rereads,
            noticed=self.noticed,
        )

    def restored(self, held: ChatSnapshot) -> Conversation:
        """The conversation of this snapshot, which is of the same chat."""
        seen = 0 if held.held is None else held.held.state.position
        log = TokenLog(held.said.log.ids, seen)
        count, noticed = self.conversation, self.noticed
        return replace(held.said.copied(), conversation=count, log=log, noticed=noticed)

    def before(self, finished: int, template: Template) -> Conversation:
        """The conversation after its first `finished` turns, for an empty cache. The documents of
        the turn after these are pending for the next question."""
        return replace(
            self.copied(),
            turns=self.turns[:finished],
            pending=[*self.turns[finished].documents],
            log=TokenLog(self._tokens(finished, template)),
            curve=self.curve[: 2 * finished],
            rereads=False,
        )

    def _tokens(self, finished: int, template: Template) -> list[int]:
        """The tokens of the conversation after its first `finished` turns, with the pending token
        if there was one. Empty if it is not clear where the later turns begin."""
        if not finished:
            return []
        question, ids = said(self.opened_with, self.turns[: finished + 1])[:-1], self.log.ids
        after = list(template.following(question))
        seen = self.turns[finished - 1].report.tokens.seen_total
        ends = [n for n in (seen, seen + 1) if ids[n : n + len(after)] == after]
        return ids[: ends[0]] if ends else []

    def without(self, turns: int) -> Conversation:
        """The conversation without its first `turns` turns, for an empty cache. Their documents
        come with the next question."""
        gone, rest = self.turns[:turns], self.turns[turns:]
        documents = tuple(document for turn in gone for document in turn.documents)
        pending = self.pending
        if rest:
            rest[0] = replace(rest[0], documents=(*documents, *rest[0].documents))
        else:
            pending = [*documents, *pending]
        curve, log = self.curve[2 * turns :], TokenLog(cut=True)
        return replace(self, turns=rest, pending=pending, log=log, curve=curve)

    def begun(self, asked: Turn, log: TokenLog, stats: CacheStats) -> Conversation:
        """The conversation after the question of `asked` was read. stats: of the cache at that
        time."""
        curve = [*self.curve, mark(stats, asked.report)]
        nothing = replace(self, pending=[], undone=[], rereads=False)
        return replace(nothing, asked=asked, log=log, curve=curve)

    def closed(self, turn: Turn, stats: CacheStats) -> Conversation:
        """The conversation after this turn, which was under way. stats: of the cache at that
        time."""
        return replace(
            self,
            asked=None,
            turns=[*self.turns, turn],
            curve=[*self.curve, mark(stats, turn.report)],
            closing=None,
        )


def mark(stats: CacheStats, report: TurnReport) -> tuple[int, int, int]:
    """A point of `ChatSession.curve`."""
    return stats.seen, stats.held_bytes + report.kv_bytes.tier_here, stats.full_bytes
