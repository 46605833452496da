"""Copies of a chat from before its turns, so that turns can be taken back."""

from __future__ import annotations

from minikv.chat.snapshot import ChatSnapshot

UNDO_TURNS = 16
UNDO_BYTES = 512 << 20
"""Turns that a chat on a terminal can take back, and bytes of host memory for their caches."""


class UndoHistory:
    """At most `turns` snapshots, of `nbytes` together; the oldest make room for new ones."""

    def __init__(self, turns: int, nbytes: int) -> None:
        self.turns, self.nbytes = turns, nbytes
        self.before: dict[int, ChatSnapshot] = {}  # by the number of turns that were finished

    def emptied(self) -> UndoHistory:
        """An empty history with the same limits."""
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

    def forget_from(self, finished: int) -> None:
        """Forget the chat as it was with so many finished turns, or more."""
        self.before = {n: each for n, each in self.before.items() if n < finished}
