"""Later questions: which of them shaped the cache, and what is read again for the next.

A policy that scores with a question keeps what that question needs, so the next one finds gaps
(FasterDecoding/SnapKV#18: "compress individually for different turns"). Three ways to live with
it: `once` goes on with the cache of the first question; `refresh` reads the whole conversation
again with each question; `blind` evicts a document before a question about it is seen, as kvpress
measures. `auto` is refresh where that is worth its time, else once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from minikv.errors import UsageError

if TYPE_CHECKING:
    from minikv.chat.report import TurnReport

REUSES = ("auto", "refresh", "once", "blind")
PATIENCE = 3.0
"""Seconds of reading that `auto` takes for a question."""
_PROBES = ("a", "7?")  # two questions that begin with nothing in common


def checked(value: str) -> str:
    """`value`, if it is one of `REUSES`. Raises UsageError."""
    if value not in REUSES:
        raise UsageError(f"reuse must be one of {', '.join(REUSES)}, got {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class Decision:
    """What `auto` chose: refresh or once, and why, in a line; without one nothing is at stake."""

    reuse: str
    why: str = ""


def decide(policy: str, asks: bool, tokens: int, reports: Sequence[TurnReport]) -> Decision:
    """Choose for a question that makes `tokens` of the conversation, where rows of a document were
    evicted. `asks`: the policy scores with the question. `reports`: earlier turns on this device.

    The same turns lead to the same choice, so a question that was taken back is answered as it was.
    """
    if not asks:
        return Decision(
            "once", f"--reuse auto keeps the cache: {policy} does not choose by what is asked"
        )
    # The longest reading is the nearest to one of everything; short ones are slower by token.
    measured = [(r.tokens.prompt_new, r.turn, r.rate.prefill_tok_s) for r in reports]
    rate = max((m for m in measured if m[2]), default=(0, 0, None))[2]
    if not rate:
        return Decision(
            "once",
            "--reuse auto keeps the cache: how fast this machine reads is not known yet; /refresh "
            "reads everything again with your next question",
        )
    seconds = tokens / rate
    if seconds < PATIENCE:
        return Decision(
            "refresh",
            f"--reuse auto reads everything again with each question, {_seconds(seconds)} now: "
            f"{policy} keeps what one question needs; /set reuse once turns that off",
        )
    return Decision(
        "once",
        f"--reuse auto keeps the cache: to read everything again takes {_seconds(seconds)} by now, "
        f"over {PATIENCE:g} s; /refresh does it for your next question",
    )


def _seconds(seconds: float) -> str:
    return f"about {seconds:.1f} s" if seconds < 10 else f"about {seconds:,.0f} s"


def parts(
    ids: list[int],
    asked: Sequence[tuple[int, str]],
    again: Callable[[int, str], list[int]],
) -> tuple[list[int], ...]:
    """`ids` cut where documents end and questions about them begin; nothing is tokenized anew.

    asked: (message, text of its documents). again(message, content): the ids with that in the
    message's place. What they have in common under two other questions belongs to no question:
    whatever the template and the tokenizer do there, no token of a question is before the cut.
    """
    cuts = {0, len(ids)}
    for at, documents in asked:
        others = [again(at, documents + probe) for probe in _PROBES]
        cuts.add(shared(ids, *others))
    return tuple(ids[a:b] for a, b in pairwise(sorted(cuts)))


def shared(*runs: Sequence[int]) -> int:
    """How many ids the runs begin with in common."""
    columns = enumerate(zip(*runs, strict=False))
    return next((i for i, column in columns if len(set(column)) > 1), min(map(len, runs)))
