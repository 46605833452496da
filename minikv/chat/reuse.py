"""What of a conversation is known when the next question comes: the words for what later questions
find in the cache, the tokens that it has seen (`TokenLog`), and those of the tier (`Stored`).

A policy that scores with the question keeps what that question needs, so a later question may lack
rows (FasterDecoding/SnapKV#18: "compress individually for different turns"). `refresh` reads the
whole conversation again with each question. `once` goes on with the cache of the first question.
`blind` evicts a document before it reads a question about it, as kvpress measures. `recall` answers
each question from the tier (`minikv.cache.tier`), as the first one was answered, without reading
again. `auto` is `blind` if the policy has a second pass, so that one cache serves all questions;
else `recall` if there is a tier; else `refresh` if the policy scores with the question; else
`once`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from minikv.errors import UsageError

REUSES = ("auto", "recall", "refresh", "once", "blind")
TIERS = ("auto", "ram", "file", "none")
TIER_DTYPES = ("same", "int8")
_BLOCK = 4096  # tokens


def checked(value: str) -> str:
    """`value`, if it is one of `REUSES`. Raises UsageError."""
    if value not in REUSES:
        raise UsageError(f"reuse must be one of {', '.join(REUSES)}, got {value!r}")
    return value


def shared(*runs: Sequence[object]) -> int:
    """The length of the longest common prefix."""
    least, at = min(map(len, runs)), 0
    while at < least:  # whole blocks at once: conversations have up to a million tokens
        first, *others = (list(run[at : min(at + _BLOCK, least)]) for run in runs)
        if any(other != first for other in others):
            columns = enumerate(zip(first, *others, strict=True))
            return at + next(i for i, column in columns if len(set(column)) > 1)
        at += _BLOCK
    return least


@dataclass(frozen=True, slots=True)
class Stored:
    """What the tier has, and whether it may be used.

    ids: the tokens whose keys and values are in it. room: whether the next question may be answered
    from it, and the whole conversation fits into it. why: why not. kind: one of `TIERS`. At least
    the last `least` tokens are read in any case, and from a multiple of `chunk` on.
    """

    ids: Sequence[int] = ()
    room: bool = False
    why: str = ""
    kind: str = "none"
    least: int = 0
    chunk: int = 1

    def gives(self, ids: Sequence[int]) -> int:
        """How many of the first tokens `ids` need not be read."""
        have = min(shared(self.ids, ids), max(0, len(ids) - self.least))
        return have - have % self.chunk


class TokenLog:
    """The tokens of a conversation. ids: as far as they are known. seen: how many of them the cache
    has seen. Each change is one assignment or one call, so that no interrupt comes into it.

    However a turn ends, the cache has seen exactly the tokens in `fed`. The last token of an answer
    was sampled but not fed to the network. A stop token is never fed, because the template puts it
    at the start of the next turn. Any other last token is the pending token, which begins the next
    prompt.
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
    def unfed(self) -> list[int]:
        """The tokens with which the next prompt begins: the pending token, if there is one."""
        return [] if self.pending is None else [self.pending]

    def read(self, ids: Iterable[int], anew: bool) -> TokenLog:
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
