"""A chat: takes documents and questions, and yields answers as pieces of text.

`ChatSession` holds the state of one conversation and its operations. `ChatSession._turn` does the
steps of a turn in order: it plans the prompt (`plan`), reads it (`reading`), writes the answer
(`answer`), and closes the turn with its record (`closing`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, Literal, Self, cast

from torch import Tensor

from minikv import checks
from minikv.cache.snapshot import SharedSnapshot
from minikv.cache.stats import CacheStats
from minikv.chat.answer import (
    Answer,
    AnswerSettings,
    Verification,
    Writer,
    looping,
    rewritten,
    thoughts_after,
    unanswered,
)
from minikv.chat.closing import Facts, Warnings, before, measured, prompt_report, turn_report
from minikv.chat.continuing import Continuing
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.fitting import fit_words
from minikv.chat.plan import (
    Composer,
    History,
    PlanSettings,
    PromptPlan,
    Question,
    plan,
    reads_again,
    recalls,
    refuse_long,
    start,
)
from minikv.chat.reading import Reader, Tools
from minikv.chat.recall import Recall
from minikv.chat.report import amount, line
from minikv.chat.snapshot import (
    ChatSnapshot,
    Conversation,
    ConversationView,
    affordable,
    refuse_continuation,
    taken_back,
)
from minikv.chat.stopping import Cancelling, Guard, Pieces, answers, changes, closed, in_background
from minikv.chat.thoughts import Say
from minikv.chat.transcript import (
    OVERFLOWS,
    REUSES,
    Document,
    Message,
    OneOf,
    Source,
    Stored,
    Template,
    Tokenizer,
    TokenLog,
    Turn,
    system_messages,
    user_message,
)
from minikv.engine.engine import Engine
from minikv.engine.sampling import Sampling
from minikv.errors import UsageError
from minikv.settings import MAX_TOKENS, Settings

_PUBLIC = (
    *("ask", "ask_async", "attach", "baseline_tok_s", "cancel", "check", "close", "configure"),
    *("continuable", "continue_answer", "conversation", "curve", "documents", "evicted_for_turn"),
    *("eviction", "fidelity", "finish", "fits", "kept", "keeps_cache", "known", "max_context"),
    *("follow", "messages", "overflow", "pending", "reads_again", "recalls", "refresh"),
    *("report", "reports", "rereading", "rereads", "reset", "restore", "reuse", "room", "seed"),
    *("skip", "snapshot", "start", "system", "turn", "turns", "undo", "undo_turns", "undone"),
    *("forgets", "verified", "verify"),
)
"""The public attributes of a chat, which `dir` shows."""

Fit = Callable[[EvictionConfig, int, int], int]
"""See `ChatSession`."""
UNDO_BYTES = 512 << 20
"""The most bytes of host memory for the copies of the cache that `undo` needs."""


class ChatSession(ConversationView):
    """One conversation over one cache.

    max_context: positions that the model was trained for. seed: for every random draw.

    These settings may be changed between turns:
    - reuse: what later questions find in the cache (see `minikv.chat.transcript`).
    - overflow: what happens to a question that does not fit the context. "refuse": it is refused.
      "drop": the oldest turns leave, but not their documents; the answer is that of a chat without
      these turns.
    - undo_turns: how many turns can be undone. Each needs a copy of the cache in host
      memory; all copies together take at most `UNDO_BYTES`.
    - fidelity: measure what eviction loses of every prompt that is recalled from a tier.

    These describe the conversation:
    - turns and reports: the turns so far, and their records.
    - undone: the turns that the last `undo` removed, until the next question.
    - verified: the result of the last `verify`; None if there is none.
    - evicted_for_turn: the number of the question for which the cache was evicted; 0 if it was
      evicted before any question; None if neither.
    - forgets: the template leaves out the thoughts of earlier turns.
    - keeps_cache: `auto` reads nothing again in this conversation.
    - rereading: `auto` is reading the conversation again, and `skip` would stop that.
    - known: if the cache is empty but a tier may have rows, the tokens of the conversation as they
      were read and written, as far as known. Tokenizing the text again may give other tokens, for
      which the tier has no rows.
    - curve: (tokens seen, bytes of cache and tier in the cache's memory, bytes of a full cache)
      after every prompt and every answer.
    - conversation: how often the chat was reset.
    - baseline_tok_s: decode speed of a full cache in tokens per second; None until it was measured
      in this chat.

    settings: the initial ones. eviction: if it differs from that of the settings. fit(eviction,
    tokens, answer): the rows per head that `budget="auto"` stands for when the cache will have seen
    `tokens` tokens before an answer of `answer`; 0: all fit. own: the model's own sampling, or why
    it has none. words: a function that rewrites warnings, in which remedies are Python code in
    backquotes.
    """

    reuse = OneOf(REUSES)
    overflow = OneOf(OVERFLOWS)

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
        self.undo_turns, self.undo_bytes = 0, UNDO_BYTES
        self._before_reading: SharedSnapshot | None = None
        self._now = Conversation(0)
        self.reset()

    @changes
    def reset(self, *, keep_documents: bool = False) -> None:
        """Forget the conversation and its cache. With `keep_documents`, the next question reads the
        documents again."""
        documents = [*self.documents, *self.pending] if keep_documents else []
        self.engine.reset()
        self.recall.clear()
        self.baseline_tok_s: float | None = None  # see the class
        self.verified: Verification | None = None
        self.keeps_cache = False
        self._told_auto: object = None  # what `auto` did when the user was last told
        self._cancelling.forget()
        self._now = Conversation(
            self.conversation + 1,
            system_messages(self.system),
            pending=documents,
            noticed=self._now.noticed,
        )

    @changes
    def follow(self, messages: Sequence[Message]) -> None:
        """Make `messages` the conversation: the next question comes after them. It reads only those
        of their tokens that are in neither the cache nor the tier, or all of them if rows were
        evicted and no tier has them. If `messages` are those of the first turns of this chat, these
        turns stay.
        """
        kv, left = self.engine.kv, len(self.messages) - len(messages)
        same = left >= 0 and _texts(self.messages[: len(messages)]) == _texts(messages)
        finished, odd = divmod(2 * len(self.turns) - left, 2)
        if kv.stats().gaps and not (self.recalls and self.recall.tokens):
            # The rows that stayed were chosen for another question.
            if same and not left and (self.reuse == "once" or self._plan_settings().blind):
                return
            log = TokenLog(cut=True)
            self.engine.reset()
            self.recall.clear()
        elif same and not left:
            return
        elif (
            same
            and not odd
            and finished > 0
            and (ids := self._now.before(finished, self.template).log.ids)
        ):
            kv.cut(min(len(ids), self.reports[finished - 1].tokens.seen_total))
            log, turns = TokenLog(ids, kv.position), self.turns[:finished]
            curve = self.curve[: 2 * finished]
            self._now = replace(self._now, turns=turns, log=log, curve=curve, undone=[], copies={})
            return
        else:
            log = TokenLog(self.log.ids, self.log.seen, cut=True)
        now = Conversation(self.conversation + 1, tuple(messages), pending=self.pending, log=log)
        self._now = replace(now, noticed=self._now.noticed)
        self.verified = self._told_auto = None
        self.keeps_cache = False

    @changes
    def refresh(self, *, wanted: bool = True) -> None:
        """Read the whole conversation again with the next question, and evict for that question,
        whatever `reuse` is. `wanted=False` cancels this. Raises UsageError if nothing was read yet.
        """
        if wanted and not self.fed:
            raise UsageError(
                "there is nothing to read again", "your next question reads everything anyway"
            )
        self._now = replace(self._now, rereads=wanted)

    @changes
    def attach(self, text: str, name: str | None = None, source: Source | None = None) -> None:
        """Put a document before the next question. `source`: the file that it was read from, for
        saved chats. Raises UsageError if it has no text."""
        if name is not None:
            checks.text("`name`", name)
        checks.unicode(name or "the document", text)
        if not text.strip():
            raise UsageError(f"{name or 'the document'} is empty", "nothing was added")
        self.pending.append(Document(text, name, source))

    def kept(self, layer: int, head: int) -> Tensor:
        """Positions that KV head `head` of `layer` still holds, ascending (LongTensor)."""
        shape = self.engine.kv.shape
        checks.whole("layer", layer, 0, shape.layers - 1)
        checks.whole("head", head, 0, shape.kv_heads - 1)
        return self.engine.kv.kept(layer, head)

    def start(self) -> list[int]:
        """Token ids before the text of the first user message, with the BOS token if the model has
        one. All conversations with this system prompt begin with them."""
        return start(self.template, self.system)

    @changes
    def configure(self, eviction: EvictionConfig) -> None:
        """Use another policy or budget from the next prompt on. Raises UsageError; then nothing
        changes."""
        self.engine.kv.configure(eviction.rules())
        self.eviction = eviction

    def check(self, eviction: EvictionConfig) -> None:
        """Raise the UsageError that `configure` would raise; change nothing."""
        self.engine.kv.check(eviction.rules())

    @changes
    def snapshot(self) -> ChatSnapshot:
        """A copy of the chat between two turns. After `restore`, every answer is bit-identical.
        Copies the rows in use to host memory."""
        return self._copied()

    def _copied(self) -> ChatSnapshot:
        held = self.engine.kv.snapshot()
        return ChatSnapshot(held, self.eviction, self.seed, self._now.copied())

    @changes
    def restore(self, snapshot: ChatSnapshot) -> None:
        """Return to `snapshot`, with its policies, budget and seed. Between turns only.

        If the snapshot has no cache, the next question reads its conversation again. Raises
        UsageError if this chat cannot use its policies, and ValueError if its cache is not from
        this network. After these errors, and if memory runs out, nothing has changed.
        """
        restored = self._now.restored(snapshot)
        self._restore(snapshot, snapshot.eviction, snapshot.seed, restored)

    def _restore(
        self, snapshot: ChatSnapshot, eviction: EvictionConfig, seed: int, restored: Conversation
    ) -> None:
        """Restore the cache of the snapshot, and use this policy, budget, seed and conversation
        from now on."""
        held, kv = snapshot.held, self.engine.kv
        under = None if eviction == snapshot.eviction else eviction.rules()
        if held is None:
            kv.reset(under or snapshot.eviction.rules())
        else:
            kv.restore(held, snapshot.eviction.rules(), under)
        self.eviction, self.seed, self._now = eviction, seed, restored
        self.baseline_tok_s = None
        self._cancelling.forget()

    @changes
    def undo(self, turns: int = 1) -> list[Turn]:
        """Take back the last `turns` turns, and return them. The documents of the first of them are
        put before the next question. Policy, budget and seed stay as they are now.

        If there is a copy of the cache from before these turns (see `undo_turns`), the first of
        their questions gets the same answer when asked again. Otherwise the next question reads the
        remaining conversation again. Raises UsageError if there are fewer turns; then nothing
        changes.
        """
        baseline, now = self.baseline_tok_s, (self.eviction, self.seed, self.template)
        snapshot, restored = taken_back(self._now, turns, *now)
        self._restore(snapshot, self.eviction, self.seed, restored)
        self.baseline_tok_s = baseline
        return restored.undone

    def cancel(self) -> None:
        """Stop the running turn at the next safe point. Safe to call from a signal handler.

        While the prompt is read, `ask` raises Interrupted, and nothing is added. While the answer
        is written, the answer ends there and stays in the conversation.
        """
        self._cancelling.cancel()

    def skip(self) -> None:
        """Like `cancel`. But while `auto` reads the conversation again, stop only that; the answer
        then comes from the cache as it is. Safe to call from a signal handler."""
        self._cancelling.skip()

    @property
    def rereading(self) -> bool:
        """Whether `auto` is reading the conversation again, which `skip` would stop."""
        return self._cancelling.rereading

    def finish(self) -> None:
        """End the answer whose iterator is open, as closing the iterator does. Raises UsageError
        while another thread computes its next piece."""
        self.guard.finish()

    def close(self) -> None:
        """Free the memory of the model and the cache. Later calls that need them raise UsageError.
        Turns and reports stay. `with minikv.load() as chat` calls it at the end."""
        self.cancel()
        self.guard.close(self._free)

    def _free(self) -> None:
        if not isinstance(self.engine, _Closed):
            self.engine.reset()
            self.recall.leave()
            self.engine = cast(Engine, _Closed())
            self._now = replace(self._now, copies={})

    def __enter__(self) -> Self:
        if self.guard.closed:
            raise closed()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __dir__(self) -> list[str]:
        return [*_PUBLIC]

    def __repr__(self) -> str:
        turns = len(self.turns)
        words = [
            "closed" if self.guard.closed else "",
            self.facts.model,
            self.eviction.pair,
            f"budget {self.eviction.budget}" if self.eviction.evicts else "",
            amount(turns, "turn"),
            f"{len(self.fed):,} of {self.max_context:,} tokens",
        ]
        return line("chat", words)

    @property
    def scoring(self) -> bool:
        """Whether a second pass is scoring the prompt that was read."""
        return self.engine.kv.scoring

    @property
    def forgets(self) -> bool:
        """See the class."""
        return self.template.tags is not None and self.template.tags.forgets

    @property
    def recalls(self) -> bool:
        """Whether `reuse` and the policies allow the next question to be answered from a tier."""
        return self.reuse in ("auto", "recall") and self.engine.kv.rules.cannot_recall is None

    @property
    def reads_again(self) -> int:
        """How many tokens `auto` would read again with the next question. If nothing is cached, how
        many tokens every question reads again."""
        if self.rereads or (self.log.seen and self.reuse != "auto"):
            return 0
        return reads_again(*self._known(self._now, len(self.log.ids)))

    @property
    def room(self) -> int:
        """Positions left in the model's context, with the pending token counted as used."""
        return self.max_context - len(self.log.ids)

    @answers
    def ask(
        self,
        question: str,
        max_tokens: int = MAX_TOKENS,
        temperature: float | Literal["auto"] = 0.0,
        *,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repeat_penalty: float = 1.0,
        stop: str | Sequence[str] | None = None,
        max_thoughts: int = 0,
        progress: Callable[[int, int], None] | None = None,
        notice: Callable[[str], None] | None = None,
        thinking: Say | None = None,
    ) -> Pieces:
        """Ask about the attached documents; yield the text of the answer piece by piece.

        `temperature` "auto" takes the temperature from the model's generation_config.json, and its
        filters where they are off here. `repeat_penalty` divides the logits of the last 64 tokens
        of the conversation (see `minikv.engine.sampling.penalized`). The answer ends before the
        first of the texts in `stop`. `progress(done, total)` is called between chunks of the
        prompt, `notice(line)` with each warning. Closing the iterator early is the same as
        `cancel`.

        The thoughts that a reasoning model writes between its tags are not part of the answer:
        `thinking(piece, tokens)` gets their text and their number of tokens so far, and
        `turns[-1].thoughts` has all of them. Stop texts do not end them. After `max_thoughts`
        tokens the closing tag is fed, and the answer follows; 0: no limit.

        From the first piece until the iterator ends, is closed or is garbage-collected, anything
        else that would change the chat raises UsageError (see `minikv.chat.stopping`).

        Raises ContextError if the prompt does not fit (it is never cut), UsageError,
        MemoryShortError, Interrupted and NumericsError. After an error while reading the prompt,
        the chat is as it was before the question. After an error while writing the answer, the part
        that was written stays.
        """
        given = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "repeat_penalty": repeat_penalty}
        settings = self._answer_settings(
            given, temperature, max_tokens, stop, max_thoughts, thinking
        )
        checks.function("progress", progress)
        checks.function("notice", notice)
        checks.unicode("the question", question)
        if not question.strip():
            raise UsageError("the question is empty", "ask something in words")
        return self._cancelling.during(self._turn(question, settings, progress, notice))

    ask_async = in_background(ask)

    @answers
    def continue_answer(
        self,
        max_tokens: int = MAX_TOKENS,
        temperature: float | Literal["auto"] = 0.0,
        *,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repeat_penalty: float = 1.0,
        stop: str | Sequence[str] | None = None,
        max_thoughts: int = 0,
        notice: Callable[[str], None] | None = None,
        thinking: Say | None = None,
    ) -> Pieces:
        """Continue an answer that ended at its `max_tokens` or was stopped; yield the text that
        follows.

        The answer is then the same as with a larger `max_tokens` from the beginning. It stays one
        turn: its answer and its record are those of the whole answer, and `undo` removes all of
        it. max_tokens: of the new part. Arguments and errors are those of `ask`. Raises UsageError
        if there is no such answer.
        """
        given = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "repeat_penalty": repeat_penalty}
        settings = self._answer_settings(
            given, temperature, max_tokens, stop, max_thoughts, thinking
        )
        checks.function("notice", notice)
        self.continuable()
        return self._cancelling.during(self._longer(settings, notice))

    @answers
    def verify(self, progress: Callable[[int, int], None] | None = None) -> Pieces:
        """Write the last answer again, with its sampling and seed, but without eviction: every
        token attends to all rows of the tier. Yields its text. `verified` then says where the two
        answers differ. The chat itself does not change.

        `progress(done, total)` is called with every token. Raises UsageError if there is no answer,
        or no tier that has its question.
        """
        checks.function("progress", progress)
        return self._cancelling.during(self._verify(progress))

    def _verify(self, progress: Callable[[int, int], None] | None) -> Pieces:
        self.verified = None
        self.verified = yield from rewritten(self._tools, self.log.ids, self.report, progress)
        if (found := self.verified.against_full) is not None:
            *turns, last = self.turns
            last = replace(last, report=replace(last.report, against_full=found))
            self._now = replace(self._now, turns=[*turns, last])

    def continuable(self) -> None:
        """Raise the UsageError that `continue_answer` would raise."""
        refuse_continuation(self.report, self.eviction, self.log, self.max_context)

    def _answer_settings(
        self,
        given: Mapping[str, Any],
        temperature: float | Literal["auto"],
        max_tokens: int,
        stop: str | Sequence[str] | None,
        max_thoughts: int,
        thinking: Say | None,
    ) -> AnswerSettings:
        """Check the settings for writing an answer. given: filters and penalty."""
        own = temperature == "auto"
        sampling = Sampling(0.0 if temperature == "auto" else temperature, **given)
        if own and self._not_own:
            why = f'{self._not_own}: `temperature="auto"` takes the likeliest token, as 0 does'
            self.engine.notices.append(why)
            self._not_own = ""  # shown once
        drawn = self.own if own else None
        return AnswerSettings.read(sampling, drawn, max_tokens, stop, max_thoughts, thinking)

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
        text, drops = user_message(self.pending, question).content, self.overflow == "drop"
        refuse_long(self.tokenizer, text, self.log.seen, self.max_context, drops=drops)
        try:  # after an error in here, the chat is as it was
            base, new = self._continuing.continued(self._now, question, tokens)
            found = self._plan(base, new, tokens, told)
            for warning in self._before(found, question):
                told.tell(warning)
            copy = self._copy(known.held_bytes)
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
        facts, baseline, here = self.facts, self.baseline_tok_s, self.recall.here
        what = base, found, read, known, settings, self.seed, self.eviction, facts, baseline, here
        record = replace(prompt_report(*what), dropped=gone)
        if gone:
            left = "oldest turn" if gone == 1 else f"{gone:,} oldest turns"
            told.later.append(f"the {left} left the conversation, because the context is full")
        asked = Turn(question, "", tuple(base.pending), record)
        log = base.log.read(found.ids, found.anew)
        now = base.begun(asked, log, self._copies(base, copy), known)
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
            full = self._continuing.nearly_full(before, len(log.ids))
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
        if isinstance(self.engine, _Closed) or sys.is_finalizing():  # nobody will ask again
            return
        kv, log = self.engine.kv, self.log
        self._cancelling.rereading = False
        kv.abandon()
        kv.settle()
        log.step(kv.position)
        if kv.position != log.seen and self._before_reading is not None:
            kv.restore(self._before_reading)
        if kv.position != log.seen:
            kv.drop()
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
        if kv.position != log.seen and not (found.anew and found.instead is None):
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
        if told is not None:
            told.tell(*self._decide(tokens, answer))
        if told is not None and self.recall.remembering:  # left by a prompt that was abandoned
            self.recall.leave()
        if told is not None and tokens < self.max_context:
            self._remember(base, question, told)
        history, held, tier, settings = self._known(base, tokens)
        return plan(history, question, held, tier, settings)

    def _remember(self, base: Conversation, question: Question, told: Warnings) -> None:
        """Prepare a tier with the rows that the store has of the conversation, if the question is
        answered from a tier or nothing is cached (but not if `tier="none"` contradicts
        `reuse="recall"`)."""
        history, held, tier, settings = self._known(base, None)
        ids, none = [*history.known, *question.ids], self.recall.kind == "none"
        why = settings.rules.cannot_recall or ""
        if history.fed:
            if none or why or not recalls(history, held, tier, settings):
                return
            ids = [*history.fed, *question.ids]
        elif none and self.reuse == "recall":
            return
        elif history.known:
            ids = [*history.known, *question.following(question.messages)]
        if settings.blind and not why:
            why = "documents are read and evicted before the question"
        documents = [*base.documents, *base.pending]
        about = ", ".join(document.name or "piped or unnamed text" for document in documents)
        told.tell(*self.recall.remember(ids, about, why))

    def _before(self, found: PromptPlan, question: str) -> Iterator[str]:
        """Lines for the user before the prompt is read. The choice of `auto` is shown once, and
        again when it changes."""
        yield from before(self.template, self.pending, question, first=not self.turns)
        about = found.reuse, self.eviction.policy, self.keeps_cache
        if found.why and not (found.auto and about == self._told_auto):
            self._told_auto = about if found.auto else self._told_auto
            yield found.why
        lines = self._new_notices()
        self._now = replace(self._now, noticed=len(self.engine.notices))
        yield from lines

    def _copy(self, nbytes: int) -> ChatSnapshot | None:
        """A copy of `nbytes` bytes from before a turn. None if turns cannot be undone, if it
        would be too large, or if memory runs out; the question is answered all the same."""
        if self.undo_turns > 0 and nbytes <= self.undo_bytes:
            with contextlib.suppress(MemoryError, RuntimeError):
                return self._copied()
        return None

    def _copies(self, base: Conversation, copy: ChatSnapshot | None) -> Mapping[int, ChatSnapshot]:
        """The copies to keep during the turn after `base`. copy: that from before the turn, if
        there is one."""
        copies = {**base.copies, **({} if copy is None else {base.turn: copy})}
        return affordable(copies, base.turn + 1 - self.undo_turns, self.undo_bytes)

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
            self.keeps_cache,
            len(self.start()) if self.pin_system and self.system else 0,
            self.overflow == "drop",
        )

    def _known(
        self, base: Conversation, tokens: int | None
    ) -> tuple[History, CacheStats, Stored, PlanSettings]:
        """The other arguments of `plan` for a question after `base`. tokens: how many the tier must
        have room for, if the question may be answered from it; None: no tier is needed."""
        history, held = History.of(base.turns, base.log), self.engine.kv.stats()
        tier, settings = self.recall.stored(), self._plan_settings()
        if tokens is not None and recalls(history, held, tier, settings):
            tier = self.recall.stored(tokens)
        return history, held, tier, settings

    @property
    def _composer(self) -> Composer:
        return Composer(self.template, self.recall.free, self._cancelling.cancelled)

    @property
    def _continuing(self) -> Continuing:
        drops = self.overflow == "drop"
        kv, forgets = self.engine.kv, self.forgets
        return Continuing(kv, self._composer, forgets, drops, self.max_context)

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

    def fits(self, answer: int = MAX_TOKENS) -> str:
        """What `budget="auto"` will do with the pending documents, in words; "" under another
        budget. answer: tokens of the next answer."""
        if self.eviction.budget.unit != "auto" or not self.eviction.may_evict:
            return ""
        base, question = self._continuing.continued(self._now, "?")
        tokens = base.log.seen + len(question.ids)
        return fit_words(self._rows_for(tokens, answer), tokens)

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


def _texts(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in messages]


_LOST = "a step failed, and nothing is cached: the next question reads or recalls everything again"


class _Closed:
    """Replaces the engine of a closed chat: every use raises UsageError."""

    def __getattr__(self, name: str) -> object:
        raise closed()
