"""Whether the turn under way is to stop: what `ChatSession.cancel` and `skip` asked for."""

from __future__ import annotations

from collections.abc import Generator


class Cancelling:
    """`cancel` and `skip` are safe to call from a signal handler.

    `rereading`: `auto` reads the conversation again, and `skip` stops only that. `skipped`: it was
    asked to.
    """

    def __init__(self) -> None:
        self.rereading = self.skipped = False
        self._calls = self._handled = 0  # calls of `cancel`, and those that are over

    def cancel(self) -> None:
        """Stop the turn."""
        self._calls += 1

    def skip(self) -> None:
        """Stop reading again; where nothing is read again, the turn."""
        if self.rereading:
            self.skipped = True
        else:
            self.cancel()

    def cancelled(self) -> bool:
        """The turn is to stop."""
        return self._calls > self._handled

    def stopped(self) -> bool:
        """What is being read is to stop, with the turn or without it."""
        return self.cancelled() or self.skipped

    def forget(self, before: int | None = None) -> None:
        """What was asked for so far is over; of `cancel`, the first `before` calls alone."""
        self._handled = max(self._handled, self._calls if before is None else before)
        self.skipped = False

    def during(self, pieces: Generator[str, None, None]) -> Generator[str, None, None]:
        """`pieces`, for which every `cancel` from now until they end is meant, also one that comes
        before the first of them is asked for."""
        before = self._calls

        def yielded() -> Generator[str, None, None]:
            self.forget(before)
            try:
                yield from pieces
            finally:
                self.forget()

        return yielded()
