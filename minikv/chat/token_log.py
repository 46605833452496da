"""The tokens of a conversation: those that the cache has seen, and the pending one.

However a turn ends, the cache has seen exactly the tokens in `TokenLog.fed`. The last token of an
answer was sampled but not fed to the network. A stop token is never fed, because the template puts
it at the start of the next turn. Any other last token is the pending token, which begins the next
prompt.
"""

from __future__ import annotations

from collections.abc import Iterable


class TokenLog:
    """ids: the tokens of the conversation, as far as they are known. seen: how many of them the
    cache has seen. Each change is one assignment or one call, so that no interrupt comes into it.
    """

    def __init__(self, ids: Iterable[int] = (), seen: int = 0) -> None:
        self.ids, self.seen = list(ids), seen

    @property
    def fed(self) -> list[int]:
        """The tokens that the cache has seen."""
        return self.ids[: self.seen]

    @property
    def pending(self) -> int | None:
        """The pending token; None if there is none."""
        return self.ids[self.seen] if 0 < self.seen < len(self.ids) else None

    @pending.setter
    def pending(self, token: int | None) -> None:
        self.ids[self.seen :] = [] if token is None else [token]

    @property
    def known(self) -> list[int]:
        """See `ChatSession`."""
        return [] if self.seen else self.ids

    @property
    def owed(self) -> list[int]:
        """The tokens with which the next prompt begins: the pending token, if there is one."""
        return [] if self.pending is None else [self.pending]

    @property
    def tokens(self) -> list[int]:
        """The tokens that the cache has seen, and the pending token."""
        return self.ids if self.seen else []

    def read(self, ids: Iterable[int], *, anew: bool) -> TokenLog:
        """The log after a prompt was read: after the tokens that the cache had seen, or, with
        `anew`, instead of them."""
        whole = [*(() if anew else self.fed), *ids]
        return TokenLog(whole, len(whole))

    def step(self, position: int) -> bool:
        """If the cache's position says that the pending token was fed, note it. Returns whether it
        was."""
        fed = self.pending is not None and position == self.seen + 1
        if fed:
            self.seen = position
        return fed
