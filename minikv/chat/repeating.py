"""How a chat's model is asked to repeat what it has read, for policies that read everything twice
(`minikv.policies.kvzip`), and what that costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from minikv.chat.planning import Planner
from minikv.chat.prompt_plan import PromptPlan
from minikv.chat.protocols import Template, Tokenizer
from minikv.chat.report import size
from minikv.chat.reuse import shared
from minikv.chat.transcript import Message
from minikv.engine.engine import Engine
from minikv.errors import MemoryShortError
from minikv.policies.base import Wording

_FIRST = "\n\nRepeat the previous context exactly."
_LATER = "\n\nRepeat the part of the previous context exactly, starting with "
_PROBES = ("a", "7?")  # two questions without a common last character


def wording(tokenizer: Tokenizer, template: Template) -> Wording:
    """The requests of the paper's release, and what the template puts behind a question."""
    one, two = (template.opening([Message("user", text)]) for text in _PROBES)
    count = shared(one[::-1], two[::-1])
    return Wording(
        tuple(tokenizer.encode(_FIRST)),
        tuple(tokenizer.encode(_LATER)),
        tuple(one[len(one) - count :]),
    )


@dataclass(frozen=True, slots=True)
class Scoring:
    """What scoring takes beside reading: tokens through the network, and bytes of host memory for
    the keys and values of the longest prompt."""

    read: int
    tokens: int
    nbytes: int

    @property
    def line(self) -> str:
        """For the user, before it is paid."""
        times = (self.read + self.tokens) / max(1, self.read)
        return (
            f"it reads {self.tokens:,} tokens more to score {self.read:,} ({times:.1f} times the "
            f"tokens, 2 to 4 times the time), with {size(self.nbytes)} of RAM until then"
        )


def scoring(engine: Engine, parts: Sequence[Sequence[int]], position: int, asks: bool) -> Scoring:
    """Of the prompts `parts`, the first of which begins at `position`; asks: the last one is a
    question alone. Raises ContextError where no position is left for it."""
    kv, read, tokens, nbytes = engine.kv, 0, 0, 0
    for part in parts:
        last = part is parts[-1]
        more = kv.scoring_tokens(len(part), position, asks=asks and last)
        if more:
            read, tokens = read + len(part), tokens + more
            nbytes = max(nbytes, kv.scoring_nbytes(len(part)))
        position += len(part)
    return Scoring(read, tokens, nbytes)


def refuse_without_memory(policy: str, nbytes: int, free: int | None) -> None:
    """Raise MemoryShortError if the host has not so many bytes. free: None if not known."""
    if free is not None and nbytes > free - free // 8:
        raise MemoryShortError(
            f"{policy} holds all keys and values until they are scored: that takes {size(nbytes)} "
            f"of RAM, and {size(free)} are free",
            "nothing was read; take another `policy`, or a shorter document",
        )


def lines(
    engine: Engine, tokenizer: Tokenizer, planner: Planner, plan: PromptPlan
) -> Iterator[str]:
    """What scoring this prompt costs, for the user, if it is scored; the requests are then ready.

    Raises MemoryShortError and ContextError where it cannot be had.
    """
    if plan.recalled or not planner.scores_twice:
        return
    kv = engine.kv
    if not any((kv.words.first, kv.words.later, kv.words.answer)):
        kv.words = wording(tokenizer, planner.composer.template)
    cost = scoring(engine, plan.parts, plan.behind(kv.position), plan.asks)
    if not cost.tokens:
        return
    policy = planner.wanted.eviction.policy
    refuse_without_memory(policy, cost.nbytes, planner.recall.free)
    if planner.wanted.reuse == "auto":
        yield (
            f'`reuse="auto"` evicts before the question is seen, so that one cache serves all '
            f"questions; {policy}: {cost.line}"
        )
    else:
        yield f"{policy} scores what is read by having it repeated: {cost.line}"
