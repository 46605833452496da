"""Finds the part of a conversation that a question continues, and warns before its context is full.

A later prompt may differ from the tokens that were read: a template may leave out the thoughts of
the last answer, or close thoughts that were stopped; with `overflow="drop"` the oldest turns leave
a full context; or another conversation has begun (`ChatSession.follow`). The tokens from the first
difference on are then discarded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from minikv.cache.kv_cache import KVCache
from minikv.chat.plan import Composer, Question
from minikv.chat.snapshot import Conversation
from minikv.chat.transcript import TokenLog, shared, user_message

_PART = 8  # a line warns when 1/8 of the context is left; dropped turns make room for as much


def continued(
    now: Conversation,
    question: str,
    composer: Composer,
    kv: KVCache,
    max_context: int,
    *,
    drops: bool,
    answer: int = 1,
) -> tuple[Conversation, Question]:
    """The conversation that this question continues, and the question. If turns may leave, and the
    context of `max_context` positions has no room for both and for an answer of `answer` tokens,
    the older half of them leaves, repeatedly. If single turns left instead, nearly every question
    would drop one, and all later turns would be read again."""
    whole = _after(now, now, question, composer, kv)
    for room in (min(answer, max_context // _PART), 1) if drops else ():
        base, left = whole, len(now.turns)
        while (full := base[0].log.seen + len(base[1].ids) + room > max_context) and left:
            left //= 2
            base = _after(now, now.without(len(now.turns) - left), question, composer, kv)
        if not full:
            return base
    return whole


def _after(
    now: Conversation, base: Conversation, question: str, composer: Composer, kv: KVCache
) -> tuple[Conversation, Question]:
    """`base` (`now`, or `now` without its oldest turns), cut to the tokens that the template
    would still write, and the question after it."""
    messages, tags = [*base.messages, user_message(base.pending, question)], composer.template.tags
    thought = now.report is not None and now.report.tokens.thoughts > 0
    # The template adds the end of a thought that never ended.
    changed = thought and (not now.turns[-1].answer or (tags is not None and tags.forgets))
    if base.log.cut or changed:
        ids, whole = now.log.ids, composer.opening(messages)
        count = min(shared(ids, whole), len(whole) - 1)  # at least one token is read
        seen = kv.holds(min(count, now.log.seen))
        if base is not now and (not seen or kv.stats().gaps):
            count = seen = 0  # like a chat that never had the other turns
        base = replace(base, log=TokenLog(ids[: seen or count], seen, cut=True))
    return base, composer.question(base, messages)


def nearly_full(before: int, now: int, max_context: int, *, drops: bool) -> Iterator[str]:
    """A line for the user if the conversation, which had `before` tokens and has `now`, has reached
    the last part of the context."""
    left = max_context - now
    if left < max_context // _PART <= max_context - before:
        then = "its oldest turns leave"
        if not drops:
            then = (
                'questions are refused: `chat.overflow = "drop"` lets the oldest turns leave '
                "instead, `chat.reset()` starts a new one"
            )
        of = f"{left:,} of {max_context:,} tokens"
        yield f"{of} are left for this conversation; then {then}"
