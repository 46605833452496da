"""What later questions find in the cache.

A policy that scores with the question keeps what that question needs. The next question then finds
gaps (FasterDecoding/SnapKV#18: "compress individually for different turns"). `once` continues with
the cache of the first question. `refresh` reads the whole conversation again with each question.
`blind` evicts a document before it sees a question about it, as kvpress measures. `auto` is
`refresh` if the policy scores with the question and reading takes less than `PATIENCE`, else
`once`.
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
"""Seconds of reading per question that `auto` accepts."""
_PROBES = ("a", "7?")  # two questions without a common first character


def checked(value: str) -> str:
    """`value`, if it is one of `REUSES`. Raises UsageError."""
    if value not in REUSES:
        raise UsageError(f"reuse must be one of {', '.join(REUSES)}, got {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class Decision:
    """What `auto` chose, refresh or once, and a line that says why; empty if both are the same."""

    reuse: str
    why: str = ""


def decide(policy: str, asks: bool, tokens: int, reports: Sequence[TurnReport]) -> Decision:
    """Choose for the next question, if rows of a document were evicted.

    asks: the policy scores with the question. tokens: the conversation's, that question included.
    reports: of earlier turns on this device. The choice depends on these alone, so a question that
    was taken back and is asked again gets the same answer.
    """
    if not asks:
        return Decision(
            "once", f"--reuse auto keeps the cache: {policy} does not choose by what is asked"
        )
    # The longest prompt predicts best: in short ones a token takes longer.
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
    """Cut `ids` where documents end and the questions about them begin.

    asked: (message, text of its documents). again(message, content): the ids with another content
    in that message. Ids that stay the same under two other questions belong to no question. So no
    token of a question is before a cut, whatever the template and the tokenizer do.
    """
    cuts = {0, len(ids)}
    for at, documents in asked:
        others = [again(at, documents + probe) for probe in _PROBES]
        cuts.add(shared(ids, *others))
    return tuple(ids[a:b] for a, b in pairwise(sorted(cuts)))


def shared(*runs: Sequence[int]) -> int:
    """The length of the common beginning."""
    columns = enumerate(zip(*runs, strict=False))
    return next((i for i, column in columns if len(set(column)) > 1), min(map(len, runs)))
