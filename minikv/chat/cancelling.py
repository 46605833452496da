"""Whether the turn under way must stop: the state behind `ChatSession.cancel` and `skip`."""

from __future__ import annotations

from collections.abc import Generator


class Cancelling:
    """`cancel` and `skip` are safe to call from a signal handler.

    rereading: `auto` is reading the conversation again, and `skip` stops only that. skipped: `skip`
    was called for that.
    """

    def __init__(self) -> None:
        self.rereading = self.skipped = False
        self._calls = self._handled = 0  # calls of `cancel`, and how many of them are done

    def cancel(self) -> None:
        """Stop the turn."""
        self._calls += 1

    def skip(self) -> None:
        """Stop reading the conversation again; if it is not read again, stop the turn."""
        if self.rereading:
            self.skipped = True
        else:
            self.cancel()

    def cancelled(self) -> bool:
        """Whether the turn must stop."""
        return self._calls > self._handled

    def stopped(self) -> bool:
        """Whether reading must stop, with the turn or without it."""
        return self.cancelled() or self.skipped

    def forget(self, before: int | None = None) -> None:
        """Forget earlier calls of `skip` and `cancel`; with `before`, only the first `before` calls
        of `cancel`."""
        self._handled = max(self._handled, self._calls if before is None else before)
        self.skipped = False

    def during(self, pieces: Generator[str, None, None]) -> Generator[str, None, None]:
        """Return `pieces`. A call of `cancel` applies to them from now until they end, also before
        the first piece is requested."""
        calls = self._calls

        def yielded() -> Generator[str, None, None]:
            self.forget(calls)
            try:
                yield from pieces
            finally:
                self.forget()

        return yielded()
