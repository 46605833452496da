"""The steps of a turn: `Turns._turn` does them in order. It plans the prompt (`plan`), reads it
(`reading`), writes the answer (`answer`), and closes the turn with its record (`closing`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from time import perf_counter
from typing import Generic, NoReturn, TypeVar

from torch import Tensor

from minikv.cache.snapshot import SharedSnapshot
from minikv.cache.stats import CacheStats
from minikv.chat.answer import (
    Answer,
    AnswerSettings,
    Verification,
    Writer,
    looping,
    thoughts_after,
    unanswered,
)
from minikv.chat.closing import Facts, Warnings, before, measured, prompt_report, turn_report
from minikv.chat.continuing import continued, nearly_full
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.fitting import fit_words
from minikv.chat.plan import (
    PROBES,
    Composer,
    PlanSettings,
    PromptPlan,
    Question,
    Situation,
    refuse_long,
)
from minikv.chat.reading import Reader, Tools
from minikv.chat.recall import Recall
from minikv.chat.snapshot import Conversation
from minikv.chat.stopping import Cancelling, Guard, Pieces, closed
from minikv.chat.transcript import (
    OVERFLOWS,
    REUSES,
    Message,
    OneOf,
    Template,
    Tokenizer,
    TokenLog,
    Turn,
    shared,
    system_messages,
    user_message,
)
from minikv.engine.engine import Engine
from minikv.engine.sampling import Sampling
from minikv.errors import UsageError
from minikv.settings import Settings

T = TypeVar("T")
_ENDS = {
    "eos": "the model ended its answer",
    "stop": "the answer ended at a stop text",
    "context": "the model's context is full",
}
_ANEW = "ask a question"
Fit = Callable[[EvictionConfig, int, int], int]
"""See `ChatSession`."""


class _Now(Generic[T]):
    """A read-only attribute of a chat, taken from its conversation."""

    def __init__(self, get: Callable[[Conversation], T]) -> None:
        self._get = get

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, chat: Turns, owner: type) -> T:
        return self._get(chat._now)

    def __set__(self, chat: object, value: object) -> NoReturn:
        raise AttributeError(f"{self._name} cannot be set")


class Turns:
    """The state of a chat, and the steps of its turns; see `ChatSession`, which adds what may be
    done with a chat, for the arguments and attributes."""

    reuse = OneOf(REUSES)
    overflow = OneOf(OVERFLOWS)
    _now: Conversation
    conversation = _Now(lambda now: now.conversation)
    turn = _Now(lambda now: now.turn)
    turns = _Now(lambda now: now.turns)
    undone = _Now(lambda now: now.undone)
    messages = _Now(lambda now: now.messages)
    documents = _Now(lambda now: now.documents)
    pending = _Now(lambda now: now.pending)
    report = _Now(lambda now: now.report)
    reports = _Now(lambda now: now.reports)
    curve = _Now(lambda now: now.curve)
    evicted_for_turn = _Now(lambda now: now.evicted_for_turn)
    rereads = _Now(lambda now: now.rereads)
    log = _Now(lambda now: now.log)
    fed = _Now(lambda now: now.log.fed)
    known = _Now(lambda now: now.log.known)
    pending_token = _Now(lambda now: now.log.pending)

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        template: Template,
        settings: Settings,
        *,
        max_context: int,
        eviction: EvictionConfig | None = None,
        recall: Recall | None = None,
        facts: Facts | None = None,
        fit: Fit = lambda eviction, tokens, answer: 0,
        own: Sampling | str | None = None,
    ) -> None:
        self.guard = Guard(self._settle)
        self.engine, self.tokenizer, self.template = engine, tokenizer, template
        self.max_context = max_context
        self.eviction = eviction or settings.eviction()
        self.seed = settings.seed
        self.system, self.pin_system = settings.system, settings.pin_system
        self.reuse = settings.reuse
        self.fidelity = settings.fidelity == "on"
        self.overflow = settings.overflow
        self.recall = recall or Recall(engine.kv)
        self.facts = facts or Facts()
        self.fit = fit
        self.own, self._not_own = (
            (Sampling(), own) if isinstance(own, str) else (own or Sampling(), "")
        )
        self.words: Callable[[str], str] = str
        self._cancelling = Cancelling()
        self._before_reading: SharedSnapshot | None = None
        self.verified: Verification | None = None
        self._told = ""  # the last `PromptPlan.why` that was shown
        self._now = Conversation(1, system_messages(self.system))

    def start(self) -> list[int]:
        """Token ids before the text of the first user message, with the BOS token if the model has
        one. All conversations with this system prompt begin with them."""
        before, opening = system_messages(self.system), self.template.opening
        one, two = (opening([*before, Message("user", probe)]) for probe in PROBES)
        return one[: shared(one, two)]

    def continuable(self) -> None:
        """Raise the UsageError that `continue_answer` would raise."""
        report, eviction = self.report, self.eviction
        if report is None:
            raise UsageError("there is no answer to continue", "ask something first")
        full = self.log.seen >= self.max_context
        if why := _ENDS["context"] if full else _ENDS.get(report.stop_reason, ""):
            raise UsageError(f"there is nothing to continue: {why}", _ANEW)
        if self.log.pending is None:
            raise UsageError("this answer cannot be continued: its end is not in the cache", _ANEW)
        if (report.policy, report.policy_options, report.budget) != (
            eviction.policy,
            eviction.options_record(),
            eviction.budget_record(),
        ):
            raise UsageError(
                "this answer cannot be continued: the policy or the budget has changed since",
                "set them back, or ask again",
            )

    # -- the steps of a turn -----------------------------------------------------------------------

    def _turn(
        self,
        question: str,
        settings: AnswerSettings,
        progress: Callable[[int, int], None] | None,
        notice: Callable[[str], None] | None,
    ) -> Pieces:
        """A question and its answer: plan, read, write; `_write` closes the turn and reports."""
        began, told = perf_counter(), Warnings(self.words, notice)
        self.guard.question = question
        chosen, known, tokens = self.eviction, self.engine.kv.stats(), settings.max_tokens
        text = user_message(self.pending, question).content
        refuse_long(self.tokenizer, text, self.log.seen, self.max_context, drops=self._drops)
        try:  # after an error in here, the chat is as it was
            base, new = self._continued(question, tokens)
            found = self._plan(base, new, tokens, told)
            for warning in self._before(found, question):
                told.tell(warning)
            how = self._plan_settings(), base.log.fed, tokens, self.fidelity, progress, told.tell
            found, read = Reader(self._tools, *how).read(
                self._cut(base, found), lambda: self._cut(base, self._plan(base, new, tokens))
            )
        except BaseException:
            self._set(chosen)
            raise
        # The prompt is in the cache. From here on the turn counts, even if the answer fails.
        known = measured(self.engine.kv, known, self.engine.kv.position)
        base, gone = replace(base, noticed=self._now.noticed), len(self.turns) - len(base.turns)
        what = base, found, read, known, settings, self.seed, self.eviction, self.facts
        record = replace(prompt_report(*what, self.recall.here), dropped=gone)
        if gone:
            left = "oldest turn" if gone == 1 else f"{gone:,} oldest turns"
            told.later.append(f"the {left} left the conversation, because the context is full")
        asked = Turn(question, "", tuple(base.pending), record)
        log = base.log.read(found.ids, found.anew)
        now = base.begun(asked, log, known)
        writer = self._writer(log, settings, began)
        thoughts = thoughts_after(self.template, found.ids, settings)
        answer = Answer(self.tokenizer.stream(), settings.stop, thoughts)
        kept = self._keep(found)
        yield from self._write(now, now, asked, writer, answer, read.logits, known, told, kept)

    def _longer(self, settings: AnswerSettings, notice: Callable[[str], None] | None) -> Pieces:
        """Continue the last answer. settings: `max_tokens` is that of the new part."""
        began = perf_counter()
        self.continuable()  # again, because the chat may have changed since `continue_answer`
        turn, known, log = self.turns[-1], self.engine.kv.stats(), self.log
        begins = len(log.ids) - turn.report.tokens.generated
        thoughts = thoughts_after(self.template, log.ids[:begins], settings)
        answer = Answer.resumed(
            self.tokenizer.stream(), settings.stop, log.ids[begins:], turn.answer, thoughts
        )
        answer.first_s = turn.report.time_s.first_token
        settings = replace(settings, max_tokens=answer.generated + settings.max_tokens)
        writer = self._writer(log, settings, began)
        last = replace(
            turn, report=replace(turn.report, seed=writer.seed, sampling=settings.record())
        )
        now = replace(self._now, undone=[])
        begun = replace(now, curve=now.curve[:-1], turns=now.turns[:-1])
        told = Warnings(str, notice)
        yield from self._write(now, begun, last, writer, answer, None, known, told, ())

    def _write(
        self,
        now: Conversation,
        begun: Conversation,
        last: Turn,
        writer: Writer,
        answer: Answer,
        logits: Tensor | None,
        known: CacheStats,
        told: Warnings,
        kept: Iterable[str],
    ) -> Pieces:
        """Write the answer of the turn `last`, and close the turn, however the writing ends. now:
        the conversation meanwhile. begun: the one to which the turn is added. kept: lines to show
        first."""
        log, begins = writer.log, len(writer.log.ids) - answer.generated
        before = last.report.tokens.seen_total  # for an answer that is continued
        if not before and begun.turns:
            before = begun.turns[-1].report.tokens.seen_total

        def closing() -> Conversation:
            ended = answer.ended(self.tokenizer, log.ids[begins:])
            stats = measured(self.engine.kv, known, log.seen)
            circles = looping(answer.ids, writer.settings.sampling, self.own)
            full = nearly_full(before, len(log.ids), self.max_context, drops=self._drops)
            late = map(self.words, [*told.later, *circles, *unanswered(ended), *full])
            lines = [*told.lines, *self._new_notices(), *late]
            took = perf_counter() - writer.began
            report = turn_report(last.report, ended, stats, took, self.recall, lines)
            thoughts = ended.thoughts.text
            turn = replace(last, answer=ended.text, report=report, thoughts=thoughts)
            closed = begun.closed(turn, stats)
            # After a failed step, the cache has seen nothing.
            seen = TokenLog(log.ids, self.engine.kv.position)
            return replace(closed, log=seen, noticed=len(self.engine.notices))

        self._now = replace(now, closing=closing)
        try:
            told.tell(*kept)
            yield from writer.write(answer, logits)
        except GeneratorExit:
            answer.reason = answer.reason or "user"
            raise
        finally:
            self._settle()
            if self._now.closing is None:  # last, because the caller's function may raise
                heard = len(last.report.warnings) + len(told.lines)
                told.say(self.turns[-1].report.warnings[heard:])

    def _settle(self) -> None:
        """Close the turn under way, and make conversation, cache and tier agree: an interrupt may
        have come between updates of any two of them. Does nothing if they agree."""
        if isinstance(self.engine, ClosedEngine) or sys.is_finalizing():  # nobody will ask again
            return
        kv, log = self.engine.kv, self.log
        kv.abandon()
        kv.settle()
        log.step(kv.position)
        if kv.position != log.seen and self._before_reading is not None:
            kv.restore(self._before_reading)
        if kv.position != log.seen:
            kv.discard()
            if _LOST not in self._new_notices():  # this may have been interrupted too
                self.engine.notices.append(_LOST)
        if self._now.closing is not None:
            self._now = self._now.closing()
        self.log.seen = kv.position
        self._before_reading = None
        self.recall.scored()

    def _cut(self, base: Conversation, found: PromptPlan) -> PromptPlan:
        """Before the plan is carried out: cut the cache back to `base` if the plan may continue it.
        This cannot be undone; if the turn fails, the next question reads more. Returns the plan."""
        kv, log = self.engine.kv, base.log
        if kv.position != log.seen and not found.anew:
            self._before_reading = None
            kv.cut(log.seen)
            self._now = replace(self._now, log=log)
        self._before_reading = kv.share()
        return found

    def _plan(
        self, base: Conversation, question: Question, answer: int, told: Warnings | None = None
    ) -> PromptPlan:
        """Plan what to read for the question after `base`. answer: the most tokens of the answer.
        told: None if this plans again because the tier failed; then the plan does not rely on the
        tier."""
        tokens = base.log.seen + len(question.ids)
        fits = tokens < self.max_context  # otherwise nothing is prepared for it
        if told is not None and self.recall.remembering:  # left by a prompt that was abandoned
            self.recall.leave()
        if told is not None and fits:
            told.tell(*self._decide(tokens, answer))
            self._remember(base, question, told)
        return self._known(base, tokens if fits else None).plan(question)

    def _remember(self, base: Conversation, question: Question, told: Warnings) -> None:
        """Prepare a tier with the rows that the store has of the conversation, if the question is
        answered from a tier or nothing is cached (but not if `tier="none"` contradicts
        `reuse="recall"`)."""
        known = self._known(base, None)
        settings, log = known.settings, base.log
        ids, none = [*log.known, *question.ids], self.recall.kind == "none"
        why = settings.rules.cannot_recall or ""
        if log.seen:
            if none or why or not known.recalls:
                return
            ids = [*log.fed, *question.ids]
        elif none and self.reuse == "recall":
            return
        elif log.known:
            ids = [*log.known, *question.following(question.messages)]
        if settings.blind and not why:
            why = "documents are read and evicted before the question"
        documents = [*base.documents, *base.pending]
        about = ", ".join(document.name or "piped or unnamed text" for document in documents)
        told.tell(*self.recall.remember(ids, about, why))

    def _before(self, found: PromptPlan, question: str) -> Iterator[str]:
        """Lines for the user before the prompt is read. The choice of `auto` is shown once, and
        again when it changes."""
        yield from before(self.template, self.pending, question, first=not self.turns)
        if found.why not in ("", self._told):
            self._told = found.why
            yield found.why
        lines = self._new_notices()
        self._now = replace(self._now, noticed=len(self.engine.notices))
        yield from lines

    def _keep(self, found: PromptPlan) -> Iterator[str]:
        """Tell the tier which tokens were read, and release resources of the old cache. Yields
        lines for the user."""
        self._before_reading = None
        failed = self.recall.keep(found.ids) if found.recalled else ""
        self.recall.scored()
        if failed:
            yield failed

    def _new_notices(self) -> list[str]:
        """The engine's notices that the user has not seen."""
        return self.engine.notices[self._now.noticed :]

    # -- what decides ------------------------------------------------------------------------------

    def _plan_settings(self) -> PlanSettings:
        return PlanSettings(
            self.eviction,
            self.engine.kv.rules,
            self.reuse,
            self.max_context,
            self.recall.remembering,
            self.rereads,
            len(self.start()) if self.pin_system and self.system else 0,
            self._drops,
        )

    def _known(self, base: Conversation, tokens: int | None) -> Situation:
        """What decides about a question after `base`. tokens: how many the tier must have room for,
        if the question may be answered from it; None: no tier is needed."""
        held, tier = self.engine.kv.stats(), self.recall.stored()
        known = Situation(base, held, tier, self._plan_settings())
        if tokens is not None and known.recalls:
            return replace(known, tier=self.recall.stored(tokens))
        return known

    @property
    def _drops(self) -> bool:
        return self.overflow == "drop"

    def _continued(self, question: str, answer: int = 1) -> tuple[Conversation, Question]:
        """See `continued`."""
        composer = Composer(self.template, self.recall.free, self._cancelling.cancelled)
        what, most = (self._now, question, composer, self.engine.kv), self.max_context
        return continued(*what, most, drops=self._drops, answer=answer)

    @property
    def _tools(self) -> Tools:
        return Tools(self.engine, self.tokenizer, self.template, self.recall, self._cancelling)

    def _writer(self, log: TokenLog, settings: AnswerSettings, began: float) -> Writer:
        engine, vocab, seed, kv = self.engine, self.tokenizer.vocab, self.seed, self.engine.kv

        def step(token: int, recent: list[int], ahead: bool) -> int:
            how = settings.sampling
            return engine.next(token, vocab, how, seed, ahead=ahead, recent=recent)

        most = self.max_context
        return Writer(self._tools, step, lambda: kv.position, log, settings, seed, most, began)

    def _rows_for(self, tokens: int, answer: int) -> int:
        """The rows per head that `budget="auto"` stands for when `tokens` tokens will have been
        read, 0 for all. Once rows were evicted, the result is never 0 again."""
        before = int(self.eviction.budget.value) if self.engine.kv.stats().gaps else 0
        rows = self.fit(self.eviction, min(tokens, self.max_context), answer)
        return min(rows or before, before or rows)

    def _decide(self, tokens: int, answer: int) -> Iterator[str]:
        """Under `budget="auto"`, decide how much stays after `tokens` tokens. Yields a line if that
        has changed, unless everything stays."""
        if self.eviction.budget.unit != "auto":
            return
        rows = self._rows_for(tokens, answer)
        if rows != self.eviction.budget.value:
            self._set(self.eviction.under(rows))
            if rows:
                yield f'`budget="auto"`: {fit_words(rows, tokens)}'

    def _set(self, eviction: EvictionConfig) -> None:
        """`configure` within a turn."""
        if eviction != self.eviction:
            self.engine.kv.configure(eviction.rules())
            self.eviction = eviction


_LOST = "a step failed, and nothing is cached: the next question reads or recalls everything again"


class ClosedEngine:
    """Replaces the engine of a closed chat: every use raises UsageError."""

    def __getattr__(self, name: str) -> object:
        raise closed()
