"""All that a turn changes in a chat (`Conversation`), copies of a chat between two turns
(`ChatSnapshot`, `UndoHistory`), and what can be taken back or continued."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from minikv import checks
from minikv.cache.snapshot import CacheSnapshot
from minikv.cache.stats import CacheStats
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.plan import PromptPlan
from minikv.chat.protocols import Template
from minikv.chat.reading import Read
from minikv.chat.report import TurnReport
from minikv.chat.reuse import TokenLog
from minikv.chat.transcript import Document, Message, Turn
from minikv.errors import UsageError

UNDO_TURNS = 16
UNDO_BYTES = 512 << 20
"""How many turns a chat on a terminal can take back, and the bytes of host memory for their
caches."""
_ENDS = {
    "eos": "the model ended its answer",
    "stop": "the answer ended at a stop text",
    "context": "the model's context is full",
}
_ANEW = "ask a question"


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
    evicted_for_turn: int | None = None
    turns: tuple[Turn, ...] = ()
    curve: tuple[tuple[int, int, int], ...] = ()
    rereads: bool = False
    known: tuple[int, ...] = ()

    @staticmethod
    def of(
        now: Conversation, eviction: EvictionConfig, seed: int, held: CacheSnapshot | None = None
    ) -> ChatSnapshot:
        """A copy of this conversation."""
        return ChatSnapshot(
            held,
            eviction,
            seed,
            tuple(now.messages),
            tuple(now.documents),
            tuple(now.pending),
            tuple(now.log.fed),
            now.log.pending,
            now.evicted_for_turn,
            tuple(now.turns),
            tuple(now.curve),
            now.rereads,
            tuple(now.log.known),
        )

    def conversation(self, now: Conversation) -> Conversation:
        """The conversation of this snapshot, in place of `now` in the same chat."""
        unfed = () if self.pending_token is None else (self.pending_token,)
        return Conversation(
            now.number,
            now.history.emptied(),
            list(self.messages),
            list(self.pending),
            list(self.documents),
            TokenLog((*self.fed, *unfed) or self.known, len(self.fed)),
            len(self.turns),
            list(self.turns),
            curve=list(self.curve),
            evicted_for_turn=self.evicted_for_turn,
            rereads=self.rereads,
            noticed=now.noticed,
        )

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


class UndoHistory:
    """At most `turns` snapshots, which take at most `nbytes` bytes together. The oldest are dropped
    for new ones."""

    def __init__(self, turns: int, nbytes: int) -> None:
        self.turns, self.nbytes = turns, nbytes
        self.before: dict[int, ChatSnapshot] = {}  # by the number of turns that were finished

    def emptied(self) -> UndoHistory:
        """An empty history with the same limits."""
        return UndoHistory(self.turns, self.nbytes)

    def copy(self, snapshot: Callable[[], ChatSnapshot], nbytes: int) -> ChatSnapshot | None:
        """Call `snapshot`, for a copy of `nbytes` bytes from before a turn. Returns None if turns
        cannot be taken back, the copy would be too large, or memory runs out; the question is
        answered in any case."""
        if self.turns > 0 and nbytes <= self.nbytes:
            with contextlib.suppress(MemoryError, RuntimeError):
                return snapshot()
        return None

    def keep(self, turn: int, snapshot: ChatSnapshot | None) -> None:
        """Keep the snapshot from before turn `turn`, counted from 0, if there is one."""
        if snapshot is not None:
            self.before[turn] = snapshot
        for n in sorted(self.before):
            total = sum(each.nbytes for each in self.before.values())
            old = n <= turn - self.turns
            # An empty cache, as before the first question, costs nothing and stays.
            if self.before[n].nbytes and (old or total > self.nbytes):
                del self.before[n]

    def until(self, finished: int) -> UndoHistory:
        """The history without the snapshots from when `finished` or more turns were finished."""
        made = self.emptied()
        made.before = {n: each for n, each in self.before.items() if n < finished}
        return made


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation; see `ChatSession` for what is not described here. It is replaced as a whole,
    by one assignment, so that an interrupt finds it as it was before the turn or as it is after it.

    number: counts the conversations of a chat. turn: the number of the last question that was read;
    0 before the first. noticed: how many notices of the engine the user has seen. closing(): the
    conversation after the turn under way, however that ended; it changes nothing, so it may be
    called again. None between turns.
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
    evicted_for_turn: int | None = None
    rereads: bool = False
    noticed: int = 0
    closing: Callable[[], Conversation] | None = None

    def begun(
        self,
        messages: list[Message],
        documents: Iterable[Document],
        plan: PromptPlan,
        read: Read,
        stats: CacheStats,
        here: int,
    ) -> Conversation:
        """The conversation once the next question was read. messages: with it. documents: those
        that came with it. plan and read: what was read. stats and here: as for `closed`."""
        evicted_for = None if plan.anew else self.evicted_for_turn
        if evicted_for is None and (read.blind or stats.shaped):
            evicted_for = 0 if read.blind else self.turn + 1
        return replace(
            self,
            messages=messages,
            documents=[*self.documents, *documents],
            pending=[],
            undone=[],
            rereads=False,
            log=self.log.read(plan.ids, anew=plan.anew),
            turn=self.turn + 1,
            curve=[*self.curve, mark(stats, here)],
            evicted_for_turn=evicted_for,
        )

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


def refuse_continuation(
    report: TurnReport | None, eviction: EvictionConfig, log: TokenLog, max_context: int
) -> None:
    """Raise UsageError if the answer of this record cannot be continued.

    report: of the last turn; None if there is none. eviction: the present settings. max_context:
    positions that the model was trained for.
    """
    if report is None:
        raise UsageError("there is no answer to go on with", "ask something first")
    full = log.seen >= max_context
    why = _ENDS["context"] if full else _ENDS.get(report.stop_reason, "")
    if why:
        raise UsageError(f"there is nothing to go on with: {why}", _ANEW)
    if log.pending is None:
        raise UsageError("this answer cannot go on: where it ended is not in the cache", _ANEW)
    if (report.policy, report.policy_options, report.budget) != (
        eviction.policy,
        eviction.options_record(),
        eviction.budget_record(),
    ):
        raise UsageError(
            "this answer cannot go on: the policy or the budget was changed since",
            "set them back, or ask again",
        )


def taken_back(
    now: Conversation, turns: int, copy: ChatSnapshot, template: Template
) -> tuple[ChatSnapshot, Conversation]:
    """The chat before its last `turns` turns, with its cache if there is a copy of it; and the
    conversation that goes on from there. copy: of `now`. Raises UsageError if there are fewer
    turns."""
    count = len(now.turns)
    checks.whole("turns", turns)
    if turns < 1:
        raise UsageError(
            f"a number of turns is 1 or more, got {turns:,}", "`chat.undo()` or `chat.undo(2)`"
        )
    if not count:
        raise UsageError("there is no turn to take back", "ask something first")
    if turns > count:
        have = "1 turn" if count == 1 else f"{count:,} turns"
        raise UsageError(f"{turns:,} turns cannot be taken back: this chat has {have}")
    finished = count - turns
    snapshot = now.history.before.get(finished) or copy.before(finished, template)
    restored, undone = snapshot.conversation(now), now.turns[finished:]
    rereads = restored.rereads or now.rereads or undone[0].report.reuse == "refresh"
    waiting = [document for document in now.pending if document not in restored.pending]
    restored = replace(
        restored,
        history=now.history.until(finished),
        pending=[*restored.pending, *waiting],
        undone=undone,
        rereads=rereads and bool(restored.log.seen),
    )
    return snapshot, restored


class ConversationView:
    """What a chat says of its conversation; see `ChatSession` for what is not described here."""

    _now: Conversation

    @property
    def conversation(self) -> int:
        return self._now.number

    @property
    def messages(self) -> list[Message]:
        """The conversation, with the question that is being answered."""
        return self._now.messages

    @property
    def pending(self) -> list[Document]:
        """Documents that come with the next question."""
        return self._now.pending

    @property
    def documents(self) -> list[Document]:
        """Documents that came with a question."""
        return self._now.documents

    @property
    def turn(self) -> int:
        """The number of the last question that was read; 0 before the first."""
        return self._now.turn

    @property
    def turns(self) -> list[Turn]:
        return self._now.turns

    @property
    def undone(self) -> list[Turn]:
        return self._now.undone

    @property
    def curve(self) -> list[tuple[int, int, int]]:
        return self._now.curve

    @property
    def evicted_for_turn(self) -> int | None:
        return self._now.evicted_for_turn

    @property
    def rereads(self) -> bool:
        """Whether the next question reads the whole conversation again."""
        return self._now.rereads

    @property
    def report(self) -> TurnReport | None:
        """The record of the last turn; None if there is none."""
        return self.turns[-1].report if self.turns else None

    @property
    def history(self) -> UndoHistory:
        """Copies of the chat from before its turns."""
        return self._now.history

    @property
    def _log(self) -> TokenLog:
        return self._now.log

    @property
    def fed(self) -> list[int]:
        """The ids of the tokens that the cache has seen."""
        return self._log.fed

    @property
    def pending_token(self) -> int | None:
        """The last token of an answer, which was not fed and begins the next prompt; None if there
        is none."""
        return self._log.pending

    @property
    def known(self) -> list[int]:
        return self._log.known

    @property
    def reports(self) -> list[TurnReport]:
        """The records of all turns so far."""
        return [turn.report for turn in self.turns]
