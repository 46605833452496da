"""The tokens of a conversation: those that the cache has seen, and the pending one.

However a turn ends, the cache has seen exactly the tokens in `TokenLog.fed`. The last token of an
answer was sampled but not fed to the network. A stop token is never fed, because the template puts
it at the start of the next turn. Any other last token is the pending token, which begins the next
prompt.
"""

from __future__ import annotations

from collections.abc import Iterable


class TokenLog:
    """fed: ids of the tokens that the cache has seen. pending: the pending token; None if there is
    none. known: see `ChatSession`."""

    def __init__(
        self, fed: Iterable[int] = (), pending: int | None = None, known: Iterable[int] = ()
    ) -> None:
        self.fed, self.pending, self.known = list(fed), pending, list(known)

    @property
    def owed(self) -> list[int]:
        """The tokens with which the next prompt begins: the pending token, if there is one."""
        return [] if self.pending is None else [self.pending]

    @property
    def tokens(self) -> list[int]:
        """The tokens that the cache has seen, and the pending token."""
        return [*self.fed, *self.owed]

    def read(self, ids: Iterable[int], *, anew: bool) -> None:
        """Note that a prompt was read: after the tokens that the cache had seen, or, with `anew`,
        instead of them."""
        if anew:
            self.fed = []
        self.fed += ids
        self.known, self.pending = [], None

    def step(self, position: int) -> bool:
        """If the cache's position says that the pending token was fed, note it. Returns whether it
        was."""
        if self.pending is None or position <= len(self.fed):
            return False
        self.fed.append(self.pending)
        self.pending = None
        return True
