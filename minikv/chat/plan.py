"""Decides what a chat reads for the next question: `Situation.plan`, a pure function of plain
values. `Composer` turns messages into tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from minikv.cache.rules import Rules
from minikv.cache.stats import CacheStats
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.snapshot import Conversation
from minikv.chat.stopping import stoppable
from minikv.chat.transcript import (
    Document,
    Message,
    Stored,
    Template,
    Tokenizer,
    rendered,
    shared,
)
from minikv.errors import ContextError, MemoryShortError, UsageError

Compose = Callable[[Sequence[Message]], list[int]]

PROBES = ("a", "7?")
"""Two questions whose first and last characters differ."""
_NO_DOCUMENT = 'there is no document to evict beforehand: `reuse="blind"` changes nothing here'
_NO_TIER = '`tier="none"`'
_LONG = 256 << 10
"""Bytes of new text above which tokenizing takes noticeable time and memory."""
_TOKENIZING = 100
"""Bytes of memory that tokenizing takes per byte of text (measured: 45 to 110)."""


@dataclass(frozen=True, slots=True)
class Question:
    """The next question. messages: the conversation with it. documents: those that come with it.
    ids: the tokens of `messages` that the cache has not seen, up to where the answer begins; made
    by `compose`. opening, following: see `Template`. begins: the position at which its turn begins,
    if there are earlier messages but no earlier turns (`ChatSession.follow`)."""

    messages: Sequence[Message]
    documents: Sequence[Document]
    ids: list[int]
    compose: Compose
    opening: Compose
    following: Compose
    begins: int | None = None


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """The settings that the decision depends on. rules: those of `eviction`. reuse: one of
    `REUSES`. remembers: the store has rows of the first prompt, or will store them. rereads: read
    everything again with this question. pinned: tokens at the beginning that must never be evicted.
    max_context: positions that the model was trained for. drops: `overflow` is "drop"."""

    eviction: EvictionConfig
    rules: Rules
    reuse: str
    max_context: int
    remembers: bool = False
    rereads: bool = False
    pinned: int = 0
    drops: bool = False

    @property
    def scores_twice(self) -> bool:
        """Whether the policy scores prompts with a second pass."""
        return self.rules.prompt is not None and self.rules.prompt.evidence.second_pass

    @property
    def asks(self) -> bool:
        """Whether the policy scores with the question."""
        return self.rules.prompt is not None and self.rules.prompt.evidence.asks

    @property
    def blind(self) -> bool:
        """Whether documents are evicted before a question about them is read."""
        return self.reuse == "blind" or (self.reuse == "auto" and self.scores_twice)


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The prompts that a turn reads.

    reuse: for the turn record. parts: the prompts, in order. anew: they are read into an empty
    cache. pinned: with `anew`, how many first positions are never evicted. recalled: the only part
    is the whole conversation, and the tier provides its first `given` tokens. begins: the position
    at which the last turn begins, if the only part is the whole conversation. asks: the last part
    only asks about earlier text. why: a line for the user, which is shown once.
    """

    reuse: str
    parts: tuple[list[int], ...]
    anew: bool
    pinned: int = 0
    recalled: bool = False
    given: int = 0
    begins: int = 0
    asks: bool = False
    why: str = ""

    @property
    def ids(self) -> list[int]:
        """The token ids of all parts."""
        return [id for part in self.parts for id in part]

    @property
    def length(self) -> int:
        """The number of tokens of all parts."""
        return sum(map(len, self.parts))

    @property
    def tokens(self) -> int:
        """The number of tokens to read."""
        return self.length - self.given

    def behind(self, seen: int) -> int:
        """How many positions come before the prompts, if the cache has seen `seen` tokens."""
        return 0 if self.anew else seen


@dataclass(frozen=True, slots=True)
class Situation:
    """What decides which prompts the next question needs: the conversation before it, the figures
    of the cache, the content of the tier, and the settings.

    | cache  | if                                           | it reads                | record  |
    |--------|----------------------------------------------|-------------------------|---------|
    | empty  | tier, which has the beginning                | what the tier lacks     | recall  |
    | empty  | tier                                         | all, as for a recall    | once *  |
    | empty  | blind, and there are documents               | all, cut after each     | blind   |
    | empty  | blind                                        | all                     | once    |
    | empty  |                                              | all                     | once *  |
    | filled | tier, which has the beginning                | what the tier lacks     | recall  |
    | filled | tier                                         | all, as for a recall    | refresh |
    | filled | `rereads`, or `reuse` is "refresh"           | all                     | refresh |
    | filled | auto or recall; rows of a document have left,| all; says why           | refresh |
    |        | the policy asks, and it fits                 |                         |         |
    | filled | the same, and now nothing has to leave       | all; says why           | refresh |
    | filled | blind, and documents come with the question  | new, cut after these    | blind   |
    | filled | auto or recall; rows of a document have left,| new; says why           | once    |
    |        | and the policy does not ask                  |                         |         |
    | filled |                                              | new                     | once    |

    * "refresh" if there were turns.

    blind: see `PlanSettings`; under `auto` only with a policy that has a second pass. all: the
    conversation, into an empty cache. new: only what the cache has not seen.
    """

    said: Conversation
    held: CacheStats
    tier: Stored
    settings: PlanSettings

    @property
    def tokens(self) -> list[int]:
        """The tokens of the earlier turns that were fed, as far as they are known."""
        report, log = self.said.report, self.said.log
        return [] if report is None else (log.fed or log.known)[: report.tokens.seen_total]

    def plan(self, question: Question) -> PromptPlan:
        """Decide what to read for the question: the first line of the table that applies.

        Raises ContextError if the prompts do not fit the model; and UsageError if `reuse` is
        "recall" and the policies or the settings rule that out.
        """
        found = self._after_cached(question) if self.said.log.seen else self._anew(question)
        if not self._fits(found):
            seen, most = self.said.log.seen, self.settings.max_context
            used, drops = found.behind(seen), self.settings.drops
            raise _too_long(f"{found.length:,}", used, seen, most, drops=drops)
        return found

    def _anew(self, question: Question) -> PromptPlan:
        """The plan if the cache has seen nothing."""
        known, tier, settings = self.said.log.known, self.tier, self.settings
        ids, fresh = question.ids, "refresh" if self.said.turns else "once"
        recalled = self.recalls and tier.room
        if recalled and known:
            ids = [*known, *question.following(question.messages)]
        whole = PromptPlan(fresh, (ids,), True, settings.pinned, begins=self._begins(question, ids))
        if recalled:
            given = tier.gives(ids)
            return replace(whole, reuse="recall" if given else fresh, recalled=True, given=given)
        asked = self._asked(question)
        if not settings.blind:
            return replace(whole, asks=not asked)
        cut = parts(ids, asked, question.compose, question.messages)
        if len(cut) > 1:
            return PromptPlan("blind", cut, True, settings.pinned, asks=True)
        by_name = settings.reuse == "blind" and settings.eviction.evicts
        why = _NO_DOCUMENT if by_name and fresh == "once" else ""
        return PromptPlan("once", cut, True, settings.pinned, asks=True, why=why)

    def _after_cached(self, question: Question) -> PromptPlan:
        """The plan if the cache has seen the conversation up to the question."""
        log, settings = self.said.log, self.settings
        if self.recalls and self.tier.room:
            whole = [*log.fed, *question.ids]
            given = self.tier.gives(whole)
            begins = log.seen if question.begins is None else question.begins
            mode = "recall" if given else "refresh"
            return PromptPlan(mode, (whole,), True, recalled=True, given=given, begins=begins)
        mode, why = self._mode()
        if mode == "refresh":
            ids = question.opening(question.messages)
            begins = self._begins(question, ids)
            again = PromptPlan("refresh", (ids,), True, settings.pinned, begins=begins, why=why)
            if not why or self._fits(again):
                return again
            why = ""
        if settings.blind and question.documents:
            asked = self._asked(question)[-1:]
            cut = parts(question.ids, asked, question.compose, question.messages)
            return PromptPlan("blind", cut, False, asks=True)
        return PromptPlan("once", (question.ids,), False, asks=not question.documents, why=why)

    @property
    def recalls(self) -> bool:
        """Whether the question is answered from a tier, if the tier has room. Raises UsageError if
        `reuse` is "recall" and the policies or `tier="none"` rule that out."""
        tier, settings = self.tier, self.settings
        if settings.remembers and not self.said.log.seen and not settings.blind:
            return True
        # Without eviction the cache has all rows, unless it is empty or another policy evicted.
        gone = bool(tier.ids) and (not self.said.log.seen or self.held.gaps)
        reuse, evicts = settings.reuse, settings.eviction.evicts
        if not (evicts or gone) or reuse not in ("auto", "recall"):
            return False
        why = settings.rules.cannot_recall
        if reuse == "recall" and (why or tier.kind == "none"):
            raise UsageError(
                f'`reuse="recall"` is not possible: {why or _NO_TIER}',
                '`reuse="auto"` reads everything again instead',
            )
        return True

    @property
    def rereads(self) -> bool:
        """Whether the question reads the whole conversation again, if no tier has it."""
        return not self.said.log.seen or self._mode()[0] == "refresh"

    def _mode(self) -> tuple[str, str]:
        """How a question after cached tokens is answered without a tier; if `auto` decides that,
        "refresh" or "once", and a line for the user that says why. Measured time plays no part: the
        same chat gets the same answers on every machine."""
        settings, policy = self.settings, self.settings.eviction.policy
        if settings.rereads or settings.reuse not in ("auto", "recall"):
            return "refresh" if settings.rereads else settings.reuse, ""
        if not self.said.documents or not self.held.evicted:
            return "once", ""
        if settings.rules.prompt is None and settings.rules.step is None:
            if not self.held.gaps:  # rows have only slid out of a window
                return "once", ""
            return "refresh", "everything is read again: now nothing has to leave the cache"
        if not settings.asks:
            why = f'`reuse="auto"` keeps the cache: {policy} does not choose by what is asked'
            return "once", why
        no_tier = f", and there is no tier ({self.tier.why})" if self.tier.why else ""
        return (
            "refresh",
            f'`reuse="auto"` reads everything again with each question: {policy} keeps what one '
            f'question needs{no_tier}; `chat.reuse = "once"` turns that off',
        )

    def _begins(self, question: Question, ids: Sequence[int]) -> int:
        """The position at which the last turn begins in `ids`, the whole conversation: how many of
        its tokens come from earlier turns."""
        if question.begins is not None:
            return question.begins
        return shared(self.tokens, ids)

    def _fits(self, found: PromptPlan) -> bool:
        """Whether the prompts and one token of an answer fit."""
        used = found.behind(self.said.log.seen) + found.length
        return used + 1 <= self.settings.max_context

    def _asked(self, question: Question) -> list[tuple[int, str]]:
        """(index in the messages, text of its documents) of each message that has documents."""
        brought = [*(turn.documents for turn in self.said.turns), question.documents]
        first = len(question.messages) + 1 - 2 * len(brought)
        return [(first + 2 * n, rendered(each)) for n, each in enumerate(brought) if each]


def parts(
    ids: list[int],
    asked: Sequence[tuple[int, str]],
    compose: Compose,
    messages: Sequence[Message],
) -> tuple[list[int], ...]:
    """Cut `ids`, the tokens of `messages`, where documents end and the questions about them begin.

    asked: for each message with documents, its index and the text of its documents. compose: turns
    `messages` into `ids`. A cut is where the ids begin to differ if the question is replaced by
    either of two others. So no token of a question is before its cut, whatever the template and the
    tokenizer do.
    """
    cuts = {0, len(ids)}
    for at, documents in asked:
        before, role, after = messages[:at], messages[at].role, messages[at + 1 :]
        others = [[*before, Message(role, documents + probe), *after] for probe in PROBES]
        cuts.add(shared(ids, *map(compose, others)))
    return tuple(ids[a:b] for a, b in pairwise(sorted(cuts)))


# -- what is refused ---------------------------------------------------------------------------


def refuse_long(
    tokenizer: Tokenizer, text: str, seen: int, max_context: int, *, drops: bool
) -> None:
    """Raise ContextError for a text of more than twice as many tokens as fit, without tokenizing
    all of it, which takes a hundred times the text's memory. The text is tokenized in pieces, which
    gives slightly more tokens than the whole text, but not twice as many. seen: tokens that the
    cache has seen."""
    count, pieces = 0, range(0, len(text), _LONG)
    for at in pieces if len(pieces) > 1 else ():
        count += len(tokenizer.encode(text[at : at + _LONG]))
        if count > 2 * max_context:
            raise _too_long(f"more than {2 * max_context:,}", 0, seen, max_context, drops=drops)


def _too_long(tokens: str, used: int, seen: int, max_context: int, *, drops: bool) -> ContextError:
    """The error for a prompt of `tokens` tokens. used: positions that stay in use. seen: tokens
    that the cache has seen. drops: `overflow` is "drop", and even that is not enough."""
    by_chat = f", {used:,} of them used by this chat" if used else ""
    choices = ["a shorter document", "a model with a longer context"]
    if seen:
        choices.insert(0, "a new conversation (`chat.reset()`)")
    if seen and not drops:
        choices.insert(0, 'one without its oldest turns (`chat.overflow = "drop"`)')
    some, last = ", ".join(choices[:-1]), choices[-1]
    return ContextError(
        f"the prompt needs {tokens} tokens and {max(max_context - used - 1, 0):,} are left: this "
        f"model was trained for {max_context:,} positions{by_chat}",
        f"eviction does not extend that, and nothing was cut; choose {some} or {last}",
    )


# -- from messages to tokens -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Composer:
    """Turns messages into token ids with a chat template. free(): free bytes of host memory, None
    if not known. stopped(): whether tokenizing must stop; ten megabytes of text take seconds.

    Its methods raise Interrupted if stopped, and MemoryShortError if the tokenizer's library would
    run out of memory and abort the process.
    """

    template: Template
    free: Callable[[], int | None]
    stopped: Callable[[], bool]

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the whole conversation, up to where the next answer begins."""
        return self._ids(self.template.opening, messages, messages)

    def following(self, messages: Sequence[Message]) -> list[int]:
        """Token ids after the last answer, up to where the next one begins."""
        return self._ids(self.template.following, messages, messages[-1:])

    def question(self, said: Conversation, messages: Sequence[Message]) -> Question:
        """The last message as a question after the conversation `said`, whose pending documents it
        brings."""
        log = said.log
        begins = len(log.fed or log.known)

        def following(messages: Sequence[Message]) -> list[int]:
            return self.opening(messages)[begins:] if log.cut else self.following(messages)

        def new(messages: Sequence[Message]) -> list[int]:
            return [*log.unfed, *following(messages)]

        compose = new if log.seen else self.opening
        ids, first = compose(messages), None
        if log.cut and not said.turns:
            answered = any(message.role == "assistant" for message in messages)
            whole = log.seen + len(ids)
            first = whole - len(self.following(messages)) if answered else 0
        return Question(messages, said.pending, ids, compose, self.opening, following, first)

    def _ids(
        self, compose: Compose, messages: Sequence[Message], new: Sequence[Message]
    ) -> list[int]:
        size = sum(len(message.content.encode("utf-8", "surrogatepass")) for message in new)
        if size < _LONG:
            return compose(messages)
        free = self.free()
        if free is not None and free < size * _TOKENIZING:
            raise MemoryShortError(
                f"tokenizing {size >> 10:,} KiB of text takes about {size * _TOKENIZING >> 20:,} "
                f"MiB of memory, and {free >> 20:,} MiB are free",
                "ask about a shorter document, or free memory",
            )
        return stoppable(lambda: compose(messages), self.stopped)
