"""What of a conversation a question continues (`continued`), and a word before its context is full.

A template may write what was said otherwise than it was read: without the thoughts of the last
answer, or, if that was stopped in them, with their end. With `overflow="drop"` the oldest turns
leave a full context. Or another conversation has begun (`ChatSession.follow`). The tokens from
there on are then not used any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from minikv.cache.kv_cache import KVCache
from minikv.chat.plan import Composer, History, Question
from minikv.chat.snapshot import Conversation
from minikv.chat.transcript import TokenLog, shared, user_message

_PART = 8  # of the context: what is left when a line says so, and what an answer finds at least


@dataclass(frozen=True, slots=True)
class Continuing:
    """Finds what a question continues. forgets: see `ChatSession`. drops: `overflow` is "drop".
    max_context: positions that the model was trained for."""

    kv: KVCache
    composer: Composer
    forgets: bool
    drops: bool
    max_context: int

    def continued(
        self, now: Conversation, question: str, answer: int = 1
    ) -> tuple[Conversation, Question]:
        """The conversation that this question continues, and the question. If turns may leave, and
        the context has no room for both and for an answer of `answer` tokens, the older half of
        them leaves, and again: one by one, with every question one would leave, and all that
        follows it would be read again."""
        whole = self._after(now, now, question)
        for room in (min(answer, self.max_context // _PART), 1) if self.drops else ():
            base, left = whole, len(now.turns)
            while (full := base[0].log.seen + len(base[1].ids) + room > self.max_context) and left:
                left //= 2
                base = self._after(now, now.without(len(now.turns) - left), question)
            if not full:
                return base
        return whole

    def _after(
        self, now: Conversation, base: Conversation, question: str
    ) -> tuple[Conversation, Question]:
        """`base`, which is `now` or what is left of it, with those of its tokens that are still
        what the template writes, and the question after it."""
        messages = [*base.messages, user_message(base.pending, question)]
        thought = now.report is not None and now.report.tokens.thoughts > 0
        # A thought that never ended is one that the template writes with its end.
        if base.log.cut or (thought and (self.forgets or not now.turns[-1].answer)):
            ids, whole = now.log.ids, self.composer.opening(messages)
            count = min(shared(ids, whole), len(whole) - 1)  # something is read
            seen = self.kv.holds(min(count, now.log.seen))
            if base is not now and (not seen or self.kv.stats().gaps):
                count = seen = 0  # as a chat that never had the others
            base = replace(base, log=TokenLog(ids[: seen or count], seen, cut=True))
        history = History.of(base.turns, base.log)
        return base, self.composer.question(history, messages, base.pending)

    def nearly_full(self, before: int, now: int) -> Iterator[str]:
        """What to tell the user if the conversation, which had `before` tokens and has `now`, has
        come into the last part of the context."""
        left = self.max_context - now
        if left < self.max_context // _PART <= self.max_context - before:
            then = "its oldest turns leave"
            if not self.drops:
                then = (
                    'questions are refused: `chat.overflow = "drop"` lets the oldest turns leave '
                    "instead, `chat.reset()` begins anew"
                )
            of = f"{left:,} of {self.max_context:,} tokens"
            yield f"{of} are left for this conversation; then {then}"
