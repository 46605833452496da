"""Copies of a chat from before its turns, so that turns can be taken back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from minikv import checks
from minikv.chat.snapshot import ChatSnapshot
from minikv.errors import UsageError

UNDO_TURNS = 16
UNDO_BYTES = 512 << 20
"""How many turns a chat on a terminal can take back, and the bytes of host memory for their
caches."""


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


def refuse_undo(turns: int, count: int) -> None:
    """Raise UsageError if a chat of `count` turns cannot take back `turns` of them."""
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
