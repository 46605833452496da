"""Copies of a chat from before its turns, so that turns can be taken back."""

from __future__ import annotations

from minikv.chat.report import size
from minikv.chat.snapshot import ChatSnapshot
from minikv.errors import UsageError

UNDO_TURNS = 16
UNDO_BYTES = 512 << 20
"""Turns that a chat on a terminal can take back, and bytes of host memory for their caches."""


class UndoHistory:
    """At most `turns` snapshots, of `nbytes` together; the oldest make room for new ones."""

    def __init__(self, turns: int, nbytes: int) -> None:
        self.turns, self.nbytes = turns, nbytes
        self.before: dict[int, ChatSnapshot] = {}  # by the number of turns that were finished

    def emptied(self) -> UndoHistory:
        """Another one with the same limits and nothing in it."""
        return UndoHistory(self.turns, self.nbytes)

    def wants(self, nbytes: int) -> bool:
        """Whether a snapshot of so many bytes would be kept."""
        return self.turns > 0 and nbytes <= self.nbytes

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

    def at(self, finished: int) -> ChatSnapshot:
        """The chat as it was with so many finished turns."""
        return self.before[finished]

    def forget_from(self, finished: int) -> None:
        """Forget the chat as it was with so many finished turns, or more."""
        self.before = {n: each for n, each in self.before.items() if n < finished}

    def check(self, turns: int, count: int, found: int) -> None:
        """Raise UsageError if the last `turns` of `count` turns cannot be taken back.

        found: turns that were there when the chat was loaded.
        """
        if turns < 1:
            raise UsageError(f"a number of turns is 1 or more, got {turns:,}", "/undo or /undo 2")
        if not count:
            raise UsageError("there is no turn to take back", "ask something first")
        if turns > count:
            have = "1 turn" if count == 1 else f"{count:,} turns"
            raise UsageError(
                f"{turns:,} turns cannot be taken back: this chat has {have}",
                f"/undo {count} takes back all of them",
            )
        if count - turns not in self.before:
            most = max((count - n for n in self.before if n > count - turns), default=0)
            more = min((count - n for n in self.before if n < count - turns), default=0)
            reach = [f"{n:,}" for n in (most, more) if n]
            works = f"/undo {' or '.join(reach)} works" if reach else ""
            if count - turns < found:
                raise UsageError(
                    f"question {count - turns + 1:,} was asked before this chat was taken up",
                    works or "/load NAME --reread, then ask it anew",
                )
            raise UsageError(
                f"the cache as it was before question {count - turns + 1:,} is not kept: at most "
                f"{self.turns:,} are, {size(self.nbytes)} in all",
                f"{works or '/clear starts anew with the documents'}; a smaller budget makes them "
                "smaller",
            )
