"""What later questions find in the cache.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from minikv.errors import UsageError

REUSES = ("auto", "recall", "refresh", "once", "blind")
TIERS = ("auto", "ram", "file", "none")
TIER_DTYPES = ("same", "int8")
REREAD_LIMIT = 32_768
"""If more tokens than this must be read again, a chat on a terminal asks first."""
_BLOCK = 4096  # tokens
_PROBES = ("a", "7?")  # two questions without a common first character


def checked(value: str) -> str:
    """`value`, if it is one of `REUSES`. Raises UsageError."""
    if value not in REUSES:
        raise UsageError(f"reuse must be one of {', '.join(REUSES)}, got {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class Decision:
    """What `auto` chose, and why. reuse: "recall", "refresh" or "once". why: a line for the user;
    "" if there is nothing to explain."""

    reuse: str
    why: str = ""


def decide(policy: str, asks: bool, keeps: bool, why: str = "") -> Decision:
    """What `auto` does with the next question, if rows of a document were evicted and there is no
    tier.

    asks: the policy scores with the question. keeps: the user does not want to read anything again.
    why: why there is no tier. Nothing else matters, e.g. no time, so the same chat gets the same
    answers on every machine.
    """
    if not asks:
        return Decision(
            "once", f'`reuse="auto"` keeps the cache: {policy} does not choose by what is asked'
        )
    if keeps:
        return Decision(
            "once",
            "the cache stays as it is, as you chose; `chat.refresh()` reads everything again",
        )
    return Decision(
        "refresh",
        f'`reuse="auto"` reads everything again with each question: {policy} keeps what one '
        f"question needs{f', and there is no tier ({why})' if why else ''}; "
        '`chat.reuse = "once"` turns that off',
    )


def parts(
    ids: list[int],
    asked: Sequence[tuple[int, str]],
    again: Callable[[int, str], list[int]],
) -> tuple[list[int], ...]:
    """Cut `ids` where documents end and the questions about them begin.

    asked: for each message with documents, its index and the text of its documents. again(index,
    content): the ids with another content of that message. A cut is where the ids begin to differ
    if the question is replaced by either of two others. So no token of a question is before its
    cut, whatever the template and the tokenizer do.
    """
    cuts = {0, len(ids)}
    for at, documents in asked:
        others = [again(at, documents + probe) for probe in _PROBES]
        cuts.add(shared(ids, *others))
    return tuple(ids[a:b] for a, b in pairwise(sorted(cuts)))


def shared(*runs: Sequence[int]) -> int:
    """The length of the longest common prefix."""
    least, at = min(map(len, runs)), 0
    while at < least:  # whole blocks at once: conversations have up to a million tokens
        first, *others = (list(run[at : min(at + _BLOCK, least)]) for run in runs)
        if any(other != first for other in others):
            columns = enumerate(zip(first, *others, strict=True))
            return at + next(i for i, column in columns if len(set(column)) > 1)
        at += _BLOCK
    return least
