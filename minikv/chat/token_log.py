"""The tokens of a conversation: those that the cache has seen, and the one that comes next.

Whatever ends a turn, the cache has seen exactly the tokens in `TokenLog.fed`. The last token of an
answer was sampled but not fed to the network. A stop token is not fed at all, because the template
puts it at the start of the next turn. Any other last token is the pending token, which begins the
next prompt.
"""

from __future__ import annotations

from collections.abc import Iterable


class TokenLog:
    """`fed`: what the cache has seen. `pending`: the pending token, None if there is none. `known`:
    where the cache is gone, the tokens of the conversation as they were read and written, as far
    as they are known; a tier has the keys and values of these, not of the text's."""

    def __init__(
        self, fed: Iterable[int] = (), pending: int | None = None, known: Iterable[int] = ()
    ) -> None:
        self.fed, self.pending, self.known = list(fed), pending, list(known)

    @property
    def owed(self) -> list[int]:
        """The pending token, if there is one: what the next prompt begins with."""
        return [] if self.pending is None else [self.pending]

    @property
    def tokens(self) -> list[int]:
        """The whole conversation, as far as the cache has seen it, and the pending token."""
        return [*self.fed, *self.owed]

    def read(self, ids: Iterable[int], *, anew: bool) -> None:
        """A prompt was read, behind what the cache had seen, or (`anew`) in place of it."""
        if anew:
            self.fed = []
        self.fed += ids
        self.known, self.pending = [], None

    def step(self, position: int) -> bool:
        """The pending token was fed, if the cache's position says so. Returns whether it was."""
        if self.pending is None or position <= len(self.fed):
            return False
        self.fed.append(self.pending)
        self.pending = None
        return True
