"""The state of a chat that a turn changes (`Conversation`), copies of a chat between two turns
(`ChatSnapshot`), and checks for undoing turns and continuing answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NoReturn, TypeVar, cast

from minikv import checks
from minikv.cache.snapshot import CacheSnapshot
from minikv.cache.stats import CacheStats
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.report import TurnReport
from minikv.chat.transcript import Document, Message, Template, TokenLog, Turn, said
from minikv.errors import UsageError

T = TypeVar("T")

UNDO_TURNS = 16
"""How many turns a chat on a terminal can undo."""
_ENDS = {
    "eos": "the model ended its answer",
    "stop": "the answer ended at a stop text",
    "context": "the model's context is full",
}
_ANEW = "ask a question"


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
    turn under way, once its question was read; its record has no answer yet. copies: copies of the
    chat, by the number of turns finished before. noticed: how many notices of the engine the user
    has seen. closing(): the conversation after the turn under way, however that ended; it has no
    side effects, so it may be called again. None between turns.
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
    copies: Mapping[int, ChatSnapshot] = field(default_factory=dict)
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

    @property
    def fed(self) -> list[int]:
        """The ids of the tokens that the cache has seen."""
        return self.log.fed

    @property
    def pending_token(self) -> int | None:
        """The last token of an answer, which was not fed and begins the next prompt; None if there
        is none."""
        return self.log.pending

    @property
    def known(self) -> list[int]:
        return self.log.known

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
        return replace(self, turns=rest, pending=pending, log=log, curve=curve, copies={})

    def begun(
        self, asked: Turn, log: TokenLog, copies: Mapping[int, ChatSnapshot], stats: CacheStats
    ) -> Conversation:
        """The conversation after the question of `asked` was read. stats: of the cache at that
        time."""
        return replace(
            self,
            asked=asked,
            log=log,
            copies=copies,
            curve=[*self.curve, mark(stats, asked.report)],
            pending=[],
            undone=[],
            rereads=False,
        )

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


def affordable(
    copies: Mapping[int, ChatSnapshot], oldest: int, nbytes: int
) -> dict[int, ChatSnapshot]:
    """The newest copies, from turn `oldest` on, that take at most `nbytes` together. A copy of an
    empty cache, as before the first question, takes nothing and stays."""
    kept, total = dict[int, ChatSnapshot](), 0
    for number in sorted(copies, reverse=True):
        total += copies[number].nbytes
        if not copies[number].nbytes or (number >= oldest and total <= nbytes):
            kept[number] = copies[number]
    return kept


def refuse_continuation(
    report: TurnReport | None, eviction: EvictionConfig, log: TokenLog, max_context: int
) -> None:
    """Raise UsageError if the answer of this record cannot be continued.

    report: of the last turn; None if there is none. eviction: the present settings. max_context:
    positions that the model was trained for.
    """
    if report is None:
        raise UsageError("there is no answer to continue", "ask something first")
    full = log.seen >= max_context
    why = _ENDS["context"] if full else _ENDS.get(report.stop_reason, "")
    if why:
        raise UsageError(f"there is nothing to continue: {why}", _ANEW)
    if log.pending is None:
        raise UsageError("this answer cannot be continued: its end is not in the cache", _ANEW)
    if (report.policy, report.policy_options, report.budget) != (
        eviction.policy,
        eviction.options_record(),
        eviction.budget_record(),
    ):
        raise UsageError(
            "this answer cannot be continued: the policy or the budget has changed since",
            "set them back, or ask again",
        )


def taken_back(
    now: Conversation, turns: int, eviction: EvictionConfig, seed: int, template: Template
) -> tuple[ChatSnapshot, Conversation]:
    """The chat before its last `turns` turns, with its cache if there is a copy of it; and the
    conversation that continues from there. eviction and seed: the present ones. Raises UsageError
    if there are fewer turns."""
    count = len(now.turns)
    checks.whole("turns", turns)
    if turns < 1:
        raise UsageError(
            f"a number of turns is 1 or more, got {turns:,}", "`chat.undo()` or `chat.undo(2)`"
        )
    if not count:
        raise UsageError("there is no turn to undo", "ask something first")
    if turns > count:
        have = "1 turn" if count == 1 else f"{count:,} turns"
        raise UsageError(f"{turns:,} turns cannot be undone: this chat has {have}")
    finished = count - turns
    snapshot = now.copies.get(finished)
    if snapshot is None:
        snapshot = ChatSnapshot(None, eviction, seed, now.before(finished, template))
    restored, undone = now.restored(snapshot), now.turns[finished:]
    rereads = restored.rereads or now.rereads or undone[0].report.reuse == "refresh"
    waiting = [document for document in now.pending if document not in restored.pending]
    restored = replace(
        restored,
        copies={number: each for number, each in now.copies.items() if number < finished},
        pending=[*restored.pending, *waiting],
        undone=undone,
        rereads=rereads and bool(restored.log.seen),
    )
    return snapshot, restored


class _Now(Generic[T]):
    """A read-only attribute of a chat, taken from its conversation."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, chat: Any, owner: type) -> T:
        return cast(T, self if chat is None else getattr(chat._now, self._name))

    def __set__(self, chat: object, value: object) -> NoReturn:
        raise AttributeError(f"{self._name} cannot be set")


class ConversationView:
    """The attributes of a chat that come from its conversation; see `ChatSession` and
    `Conversation`."""

    _now: Conversation

    conversation = _Now[int]()
    turn = _Now[int]()
    turns = _Now[list[Turn]]()
    undone = _Now[list[Turn]]()
    messages = _Now[list[Message]]()
    documents = _Now[list[Document]]()
    pending = _Now[list[Document]]()
    report = _Now[TurnReport | None]()
    reports = _Now[list[TurnReport]]()
    curve = _Now[list[tuple[int, int, int]]]()
    evicted_for_turn = _Now[int | None]()
    rereads = _Now[bool]()
    fed = _Now[list[int]]()
    known = _Now[list[int]]()
    pending_token = _Now[int | None]()
    log = _Now[TokenLog]()
