"""Decides what a chat reads for the next question: `Planner.plan`.

There are four ways (see `minikv.chat.reuse`): only the new tokens, after those that the cache has
seen; the whole conversation again; a document and the question about it as separate prompts; or the
whole conversation, of which the tier has the beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minikv.cache.kv_cache import KVCache
from minikv.chat import reuse
from minikv.chat.composing import Composer, start, with_content
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.prompt_plan import PromptPlan
from minikv.chat.recall import Recall
from minikv.chat.reuse import Decision
from minikv.chat.token_log import TokenLog
from minikv.chat.transcript import Document, Message, Turn
from minikv.errors import UsageError


@dataclass(frozen=True, slots=True)
class Past:
    """The conversation before the next question. documents: those of the turns so far. pending:
    those that come with the next question."""

    turns: Sequence[Turn]
    documents: Sequence[Document]
    pending: Sequence[Document]
    log: TokenLog


@dataclass(frozen=True, slots=True)
class Wanted:
    """The user's settings. reuse: one of `reuse.REUSES`. rereads: read everything again with this
    question. keeps_cache: `auto` must not read anything again. pinned: the system prompt, if its
    tokens must never be evicted; else ""."""

    reuse: str
    rereads: bool
    keeps_cache: bool
    eviction: EvictionConfig
    pinned: str


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans the next prompt. It changes nothing but the tier, which it creates if needed, and from
    which it drops the rows of tokens that are not in the conversation."""

    past: Past
    wanted: Wanted
    kv: KVCache
    recall: Recall
    composer: Composer
    max_context: int

    def coming(self, messages: Sequence[Message]) -> list[int]:
        """The ids that the cache has not seen of `messages`, which include the next question, up to
        where the answer begins."""
        if not self.past.log.fed:
            return self.composer.opening(messages)
        return self.past.log.owed + self.composer.following(messages)

    def plan(
        self, messages: Sequence[Message], coming: list[int] | None = None
    ) -> tuple[PromptPlan, Decision | None]:
        """What to read so that the cache has seen `messages`; and what `auto` chose, if it had a
        choice. coming: the result of `coming`, if it is known.

        Raises UsageError if `reuse` is "recall" and that is not possible, and what `Composer`
        raises.
        """
        pinned = len(start(self.composer.template, self.wanted.pinned)) if self.wanted.pinned else 0
        recalls = self.recalls()
        coming = self.coming(messages) if coming is None else coming
        if not self.past.log.fed:
            return self._from_the_beginning(messages, coming, pinned, recalls), None
        return self._behind_what_is_there(messages, coming, pinned, recalls)

    def _from_the_beginning(
        self, messages: Sequence[Message], ids: list[int], pinned: int, recalls: bool
    ) -> PromptPlan:
        """The plan if the cache has seen nothing: read everything that is not in the tier."""
        log, again = self.past.log, bool(self.past.turns)
        if recalls and self.recall.ready(len(ids)):
            if log.known:
                ids = log.known + self.composer.following(messages)
            given = self.recall.given(ids)
            mode = "recall" if given else "refresh" if again else "once"
            return PromptPlan(mode, (ids,), True, pinned, True, given, self._last_turn(ids))
        with_documents = self._asked(messages)
        if not self.blind:
            mode, begins = "refresh" if again else "once", self._last_turn(ids)
            return PromptPlan(mode, (ids,), True, pinned, begins=begins, asks=not with_documents)
        parts = reuse.parts(ids, with_documents, with_content(self.composer.opening, messages))
        mode = "blind" if len(parts) > 1 else "once"
        return PromptPlan(mode, parts, True, pinned, asks=True)

    def _behind_what_is_there(
        self, messages: Sequence[Message], coming: list[int], pinned: int, recalls: bool
    ) -> tuple[PromptPlan, Decision | None]:
        """The plan if the cache has seen the conversation up to the next question."""
        log, wanted = self.past.log, self.wanted
        new, decision = self._new(coming), None
        whole = log.fed + new.ids
        if recalls and self.recall.ready(len(whole)):
            given = self.recall.given(whole)
            mode = "recall" if given else "refresh"
            if wanted.reuse == "auto" and not wanted.rereads:
                decision = Decision(mode)
            return PromptPlan(mode, (whole,), True, 0, True, given, len(log.fed)), decision
        mode = "refresh" if wanted.rereads else wanted.reuse
        if mode in ("auto", "recall"):  # there is no tier
            decision = self.decide()
            mode = decision.reuse
        if mode == "refresh":
            ids = self.composer.opening(messages)
            again = PromptPlan("refresh", (ids,), True, pinned, begins=self._last_turn(ids))
            if decision is None or again.fits(len(log.fed), self.max_context):
                return again, decision
            decision = None
        if self.blind and self.past.pending:
            following = with_content(lambda m: log.owed + self.composer.following(m), messages)
            parts = reuse.parts(new.ids, self._asked(messages)[-1:], following)
            return PromptPlan("blind", parts, False, asks=True), None
        return new, decision

    def only_new(self, messages: Sequence[Message]) -> PromptPlan:
        """The plan that reads only the new tokens, after those that the cache has seen."""
        return self._new(self.past.log.owed + self.composer.following(messages))

    def _new(self, ids: list[int]) -> PromptPlan:
        return PromptPlan("once", (ids,), False, asks=not self.past.pending)

    def _last_turn(self, ids: Sequence[int]) -> int:
        """The position at which the last turn begins in `ids`, the whole conversation: how many of
        its tokens are those that earlier turns read and wrote."""
        turns, log = self.past.turns, self.past.log
        seen = turns[-1].report.tokens.seen_total if turns else 0
        return reuse.shared((log.fed or log.known)[:seen], ids)

    def _asked(self, messages: Sequence[Message]) -> list[tuple[int, str]]:
        """(index in the messages, text of its documents) of each message that has documents, the
        next question included."""
        turns = self.past.turns
        first = len(messages) - 1 - 2 * len(turns)
        brought = [*(turn.documents for turn in turns), self.past.pending]
        return [
            (first + 2 * n, "".join(document.rendered() for document in documents))
            for n, documents in enumerate(brought)
            if documents
        ]

    # -- which way ------------------------------------------------------------------------------

    @property
    def scores_twice(self) -> bool:
        """Whether the policy scores prompts with a second pass."""
        prompt = self.kv.rules.prompt
        return prompt is not None and prompt.evidence.second_pass

    @property
    def blind(self) -> bool:
        """Whether documents are evicted before a question about them is read."""
        reuse = self.wanted.reuse
        return reuse == "blind" or (reuse == "auto" and self.scores_twice)

    def recalls(self) -> bool:
        """Whether the question is answered from a tier, if there can be one. Raises UsageError if
        `reuse` is "recall" and the policies or `tier="none"` rule that out."""
        reuse, evicts = self.wanted.reuse, self.wanted.eviction.evicts
        # Without eviction the cache has all rows, unless it is empty or another policy evicted.
        gone = self.recall.tokens > 0 and (not self.past.log.fed or self.kv.stats().gaps)
        if not (evicts or gone) or reuse not in ("auto", "recall"):
            return False
        why = self.kv.rules.cannot_recall
        if reuse == "recall" and (why or self.recall.kind == "none"):
            raise UsageError(
                f'`reuse="recall"` cannot be had: {why or _NO_TIER}',
                '`reuse="auto"` reads everything again instead',
            )
        return True

    def decide(self) -> Decision:
        """What `auto` does if there is no tier."""
        if not self.past.documents or not self.kv.stats().evicted:
            return Decision("once")
        eviction = self.wanted.eviction
        prompt = eviction.rules().prompt
        asks = prompt is not None and prompt.evidence.asks
        return reuse.decide(eviction.policy, asks, self.wanted.keeps_cache, self.recall.why)

    # -- what is read again ----------------------------------------------------------------------

    def reads_again(self) -> int:
        """How many tokens `auto` would read again with the next question."""
        fed = self.past.log.fed
        if not fed or self.wanted.rereads or self.wanted.reuse != "auto":
            return 0
        if self.recalls() and self.recall.ready(len(fed)):
            has = self.recall.has(fed)
            return len(fed) - has if self._lacks(has) else 0
        return len(fed) if self.decide().reuse == "refresh" else 0

    def rereads(self, plan: PromptPlan, decision: Decision | None) -> bool:
        """Whether `auto` reads the conversation again with this plan."""
        again = plan.recalled and self._lacks(plan.given)
        return decision is not None and (plan.reuse == "refresh" or again)

    def _lacks(self, tokens: int) -> bool:
        """Whether the first `tokens` tokens are fewer than the last question's prompt had in
        all."""
        if not self.past.turns:
            return False
        last = self.past.turns[-1].report.tokens
        return tokens < last.prompt_reused + last.prompt_new

    # -- what needs a tier -----------------------------------------------------------------------

    def refuse_without_tier(
        self, recalled: bool, tokens: int, refresh_every: int, quality: float
    ) -> None:
        """Raise UsageError if one of these settings is on, needs a tier for `tokens` tokens, and
        there is none. recalled: whether the prompt is recalled."""
        named = {"refresh_every": refresh_every, "quality": quality}
        name = next((name for name, value in named.items() if value), None)
        if name is None:
            return
        tokens = min(tokens, self.max_context) if refresh_every else 0
        eviction = self.wanted.eviction
        evicts = eviction.evicts  # not what an earlier policy left in the tier
        if eviction.may_evict and eviction.budget.everything:
            return
        if recalled and evicts and self.recall.ready(tokens):
            return
        why = self.recall.why or "none fits"
        if not evicts:
            why = "nothing is evicted"
        elif self.wanted.reuse not in ("auto", "recall"):
            why = f'`reuse="{self.wanted.reuse}"`'
        raise UsageError(
            f"`{name}={named[name]}` needs all that was read in a tier, and there is none ({why})",
            f"`{name}=0` answers without",
        )


_NO_TIER = '`tier="none"`'
