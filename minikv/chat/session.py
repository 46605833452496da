"""A chat: documents and questions in, pieces of text out.

Whatever ends a turn, the cache has seen exactly the tokens in `ChatSession.fed`. The last token of
an answer was sampled but not fed to the network. A stop token is not fed at all, because the
template puts it at the start of the next turn. Any other last token is the pending token, which
begins the next prompt.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, replace
from time import perf_counter
from typing import Self, cast

from torch import Tensor

from minikv import checks
from minikv.cache.stats import CacheStats, Fidelity
from minikv.cache.tier_rows import TierError
from minikv.chat import prompt_plan, repeating, reuse, shown
from minikv.chat.answer import Anew, Answer
from minikv.chat.background import in_background
from minikv.chat.continuation import continued, refusal
from minikv.chat.eviction_config import EvictionConfig, read_budget
from minikv.chat.facts import Facts, device_memory
from minikv.chat.fidelity import Measuring
from minikv.chat.guard import Guard, answers, changes, closed
from minikv.chat.min_tokens import longest_token
from minikv.chat.prompt_plan import PromptPlan, Read
from minikv.chat.protocols import Template, Tokenizer
from minikv.chat.recall import Recall
from minikv.chat.report import (
    UNKNOWN,
    KvBytes,
    Loss,
    Rates,
    Seconds,
    Tokens,
    TurnReport,
)
from minikv.chat.reuse import Decision
from minikv.chat.snapshot import ChatSnapshot
from minikv.chat.stop import stop_texts
from minikv.chat.stoppable import stoppable
from minikv.chat.transcript import Document, Message, Source, Turn, user_message
from minikv.chat.undo import UNDO_BYTES, UndoHistory
from minikv.chat.verify import Verification, rewritten
from minikv.chat.warnings import check_text, marker_lines
from minikv.engine.engine import Engine
from minikv.engine.sampling import Sampling, pick
from minikv.errors import ContextError, Interrupted, MemoryShortError, UsageError
from minikv.policies import DEFAULT_BUDGET

_LONG = 256 << 10
"""Bytes of new text from which on tokenizing takes a noticeable time, and memory."""
_TOKENIZING = 100
"""Bytes of memory that tokenizing takes for each byte of text (measured: 45 to 110)."""


class ChatSession:
    """One conversation over one cache.

    `max_context`: positions that the model was trained for. `seed`: of every random draw. `reuse`:
    what later questions find (see `minikv.chat.reuse`). `undo_turns`: how many turns `undo` can
    take back; each costs a copy of the cache in host memory, `UNDO_BYTES` in all. `refresh_every`:
    after so many tokens of an answer the rows under the budget are chosen anew, from all that was
    read and written; 0: never. `quality`: in place of the budget, the smallest one whose first
    token is at most so many nats from a full cache's, the budget at the most; 0: the budget.
    `fidelity`: measure what the rows lose with every prompt that a tier has. These five may be set
    between turns.

    `verified`: what the last `verify` found.

    `words`: how a warning is put; what to do about it comes as Python, in backquotes.

    `keeps_cache`: `auto` reads nothing again in this conversation. `rereading`: `auto` is reading
    again, and `skip` would stop that.

    `known`: where the cache is gone, the tokens of the conversation as they were read and written,
    as far as they are known; a tier has the keys and values of these, not of the text's.

    `shaped_by`: the number of the question for which the cache was evicted, 0 if it was evicted
    before any question. `turns` and `reports`: those of the conversation so far. `undone`: the
    turns that the last `undo` took back, until the next question. `curve`: (tokens seen, bytes
    held, bytes of a full cache) after every prompt and every answer. `conversation`: how often the
    chat was reset. `baseline_tok_s`: decode speed of a full cache, None until it was measured in
    this chat.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        template: Template,
        *,
        max_context: int,
        eviction: EvictionConfig | None = None,
        seed: int = 0,
        system: str = "",
        facts: Facts | None = None,
        pin_system: bool = False,
        undo_turns: int = 0,
        reuse: str = "once",
        recall: Recall | None = None,
        refresh_every: int = 0,
        quality: float = 0.0,
        fidelity: bool = True,
    ) -> None:
        self.guard = Guard()
        self.engine = engine
        self.tokenizer = tokenizer
        self.template = template
        self.max_context = max_context
        self.eviction = eviction or EvictionConfig.read()
        self.seed = seed
        self.system = system
        self.pin_system = pin_system
        self.facts = facts or Facts()
        self._noticed = 0  # notices of the engine that the user has seen
        self.history = UndoHistory(undo_turns, UNDO_BYTES)
        self.reuse = reuse
        self.recall = recall or Recall(engine.kv)
        self.refresh_every, self.quality, self.fidelity = refresh_every, quality, fidelity
        self.words: Callable[[str], str] = str
        self._longest: float | None = None  # bytes per token at the most, once it was needed
        self.conversation = 0
        self._cancels = self._handled = 0  # calls of `cancel`, and those that are over
        self.reset()

    @changes
    def reset(self, *, keep_documents: bool = False) -> None:
        """Forget the conversation and its cache. With `keep_documents`, the next question reads the
        documents again."""
        documents = [*self.documents, *self.pending] if keep_documents else []
        self.engine.reset()
        self.recall.clear()
        self.pending: list[Document] = documents
        self.documents: list[Document] = []
        self.messages: list[Message] = [Message("system", self.system)] if self.system else []
        self.fed: list[int] = []
        self.known: list[int] = []
        self.pending_token: int | None = None
        self.turn = 0
        self.shaped_by: int | None = None
        self.report: TurnReport | None = None
        self.turns: list[Turn] = []
        self.undone: list[Turn] = []
        self.curve: list[tuple[int, int, int]] = []
        self.baseline_tok_s: float | None = None  # see the class
        self.history = self.history.emptied()
        self.verified: Verification | None = None
        self.rereads = self.keeps_cache = False
        self._told: object = None  # the last line about what `auto` does
        self._forget_cancels()
        self.rereading = False
        self.conversation += 1

    @property
    def reuse(self) -> str:
        """What a later question finds, one of `reuse.REUSES`. May be set between turns; raises
        UsageError for anything else."""
        return self._reuse

    @reuse.setter
    def reuse(self, value: str) -> None:
        self._reuse = reuse.checked(value)

    @changes
    def refresh(self, *, wanted: bool = True) -> None:
        """Read the whole conversation again with the next question, and evict for that question,
        whatever `reuse` says. `wanted` False cancels this. Raises UsageError if nothing was read
        yet.
        """
        if wanted and not self.fed:
            raise UsageError(
                "there is nothing to read again", "your next question reads all there is"
            )
        self.rereads = wanted

    @property
    def undo_turns(self) -> int:
        """How many turns `undo` can take back. May be set between turns."""
        return self.history.turns

    @undo_turns.setter
    def undo_turns(self, turns: int) -> None:
        self.history.turns = turns

    @property
    def reports(self) -> list[TurnReport]:
        """The records of all turns so far."""
        return [turn.report for turn in self.turns]

    @changes
    def attach(self, text: str, name: str | None = None, source: Source | None = None) -> None:
        """Put a document before the next question. `source`: the file that it was read from, for
        saved chats. Raises UsageError if it has no text."""
        if name is not None:
            checks.text("`name`", name)
        check_text(text, name or "the document")
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
        """Token ids before the text of the first user message, with the BOS if the model has one:
        what two conversations with this system prompt have in common."""
        system = [Message("system", self.system)] if self.system else []
        one, two = (self.template.opening([*system, Message("user", t)]) for t in ("a", "7?"))
        return one[: reuse.shared(one, two)]

    @changes
    def configure(self, eviction: EvictionConfig) -> None:
        """Use another policy or budget from the next prompt on. On UsageError nothing changes."""
        self.engine.kv.configure(*eviction.policies())
        self.eviction = eviction

    def check(self, eviction: EvictionConfig) -> None:
        """Raise the UsageError that `configure` would raise; change nothing."""
        self.engine.kv.check(*eviction.policies())

    def snapshot(self) -> ChatSnapshot:
        """A copy of the chat between two turns. After `restore`, every answer is bit-identical. The
        rows in use are copied to host memory."""
        with self.guard.change(inside=True):
            assert self.turn == len(self.turns), "a turn is under way"
            return ChatSnapshot(
                self.engine.kv.snapshot(),
                self.eviction,
                self.seed,
                tuple(self.messages),
                tuple(self.documents),
                tuple(self.pending),
                tuple(self.fed),
                self.pending_token,
                self.shaped_by,
                tuple(self.turns),
                tuple(self.curve),
                self.rereads,
                tuple(self.known),
            )

    @changes
    def restore(self, snapshot: ChatSnapshot) -> None:
        """Go back to `snapshot`, policies, budget and seed included. Between turns only.

        If the snapshot has no cache, the next question reads its conversation again. Raises
        UsageError if this chat cannot have those policies, ValueError if the cache is not from this
        network. On these errors, and if memory runs out, nothing changes.
        """
        self._restore(snapshot, snapshot.eviction)

    def _restore(self, snapshot: ChatSnapshot, eviction: EvictionConfig) -> None:
        """`restore`, and use this policy and budget from then on."""
        held, kv = snapshot.held, self.engine.kv
        under = None if eviction == snapshot.eviction else eviction.policies()
        if held is None:
            kv.restart(*(under or snapshot.eviction.policies()))
        else:
            kv.restore(held, *snapshot.eviction.policies(), under)
        self.eviction, self.seed = eviction, snapshot.seed
        self.messages, self.documents = list(snapshot.messages), list(snapshot.documents)
        self.pending, self.fed = list(snapshot.pending), list(snapshot.fed)
        self.known = list(snapshot.known)
        self.pending_token, self.shaped_by = snapshot.pending_token, snapshot.shaped_by
        self.turns, self.curve = list(snapshot.turns), list(snapshot.curve)
        self.turn = len(self.turns)
        self.report = self.turns[-1].report if self.turns else None
        self.undone, self.baseline_tok_s = [], None
        self.history = self.history.emptied()
        self.rereads = snapshot.rereads
        self._forget_cancels()

    @changes
    def undo(self, turns: int = 1) -> list[Turn]:
        """Take back the last `turns` turns, and return them. The documents of the first go in front
        of the next question. Policy, budget and seed stay as they are now.

        Where there is a copy of the cache from before them (see `undo_turns`), the first of their
        questions, asked again, gets the same answer. Where there is none, the next question reads
        the conversation that is left again. Raises UsageError if there are not so many turns; then
        nothing changes.
        """
        self._undoable(turns)
        finished = len(self.turns) - turns
        seed, pending, history = self.seed, self.pending, self.history
        taken, baseline = self.turns[finished:], self.baseline_tok_s
        rereads = self.rereads or taken[0].report.reuse == "refresh"
        before = history.before.get(finished) or self._without_cache(finished)
        self._restore(before, self.eviction)
        self.rereads = (self.rereads or rereads) and bool(self.fed)
        self.undone, self.seed, self.baseline_tok_s = taken, seed, baseline
        self.pending += [d for d in pending if d not in self.pending]
        history.forget_from(finished)
        self.history = history
        return taken

    def _undoable(self, turns: int) -> None:
        count = len(self.turns)
        checks.whole("turns", turns)
        if turns < 1:
            raise UsageError(
                f"a number of turns is 1 or more, got {turns:,}", "`chat.undo()` or `chat.undo(2)`"
            )
        if not count:
            raise UsageError("there is no turn to take back", "ask something first")
        if turns > count:
            have = "1 turn" if count == 1 else f"{count:,} turns"
            raise UsageError(f"{turns:,} turns cannot be taken back: this chat has {have}")

    def _without_cache(self, finished: int) -> ChatSnapshot:
        """The chat as it was with so many finished turns, without its cache."""
        turns = tuple(self.turns[:finished])
        first = len(self.messages) - 2 * (len(self.turns) - finished)
        return ChatSnapshot(
            None,
            self.eviction,
            self.seed,
            tuple(self.messages[:first]),
            tuple(document for turn in turns for document in turn.documents),
            self.turns[finished].documents,
            turns=turns,
            curve=tuple(self.curve[: 2 * finished]),
            known=self._tokens(finished),
        )

    def _tokens(self, finished: int) -> tuple[int, ...]:
        """The tokens of the conversation when so many turns were finished, with the last one of an
        answer that was not fed; none where they cannot be told apart from those that came later."""
        if not finished:
            return ()
        first = len(self.messages) - 2 * (len(self.turns) - finished)
        after = self.template.following(self.messages[: first + 1])
        ids, seen = self.fed or self.known, self.turns[finished - 1].report.tokens.seen_total
        ends = [end for end in (seen, seen + 1) if ids[end : end + len(after)] == after]
        return tuple(ids[: ends[0]]) if ends else ()

    def cancel(self) -> None:
        """Stop the running turn at the next safe point: safe to call from a signal handler.

        While the prompt is read, `ask` raises Interrupted and nothing was added. While the answer
        is written, the answer ends there and stays in the conversation.
        """
        self._cancels += 1

    def skip(self) -> None:
        """As `cancel`; but while `auto` reads the conversation again, only that is stopped, and the
        answer comes from the cache as it is. Safe to call from a signal handler."""
        if self.rereading:
            self._skips = True
        else:
            self.cancel()

    @property
    def _cancelled(self) -> bool:
        return self._cancels > self._handled

    def _forget_cancels(self, before: int | None = None) -> None:
        """What was cancelled so far is over; or the first calls, as many as `before`."""
        self._handled = max(self._handled, self._cancels if before is None else before)
        self._skips = False

    def _cancellable(self, pieces: Generator[str, None, None]) -> Generator[str, None, None]:
        """`pieces`, for which every `cancel` from now until they end is meant, also one that comes
        before the first of them is asked for."""
        before = self._cancels

        def yielded() -> Generator[str, None, None]:
            self._forget_cancels(before)
            try:
                yield from pieces
            finally:
                self._forget_cancels()

        return yielded()

    def finish(self) -> None:
        """End an answer whose iterator is open, as closing the iterator does. Raises UsageError
        while another thread computes its next piece."""
        self.guard.finish()

    def close(self) -> None:
        """Give the memory of model and cache back; what is asked of the chat from then on is a
        UsageError. Turns and reports stay. `with minikv.load() as chat` does it at the end."""
        self.cancel()
        self.guard.close(self._free)

    def _free(self) -> None:
        if not isinstance(self.engine, _Closed):
            self.engine.reset()
            self.engine = cast(Engine, _Closed())
            self.history = self.history.emptied()

    def __enter__(self) -> Self:
        if self.guard.closed:
            raise closed()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.guard.closed:
            return shown.line("chat", ["closed", *self._about()])
        return shown.line("chat", self._about())

    def _repr_html_(self) -> str:
        rows = [("chat", ", ".join(filter(None, self._about())))]
        rows += [("document", document.name or "without a name") for document in self.documents]
        rows += [("document, not read yet", d.name or "without a name") for d in self.pending]
        for number, turn in enumerate(self.turns, 1):
            rows += [(f"question {number}", turn.question), (f"answer {number}", turn.answer)]
        return shown.table("minikv chat", rows)

    def _about(self) -> list[str]:
        turns = len(self.turns)
        return [
            self.facts.model,
            self.eviction.pair,
            f"budget {self.eviction.budget}" if self.eviction.evicts else "",
            "1 turn" if turns == 1 else f"{turns:,} turns",
            f"{len(self.fed):,} of {self.max_context:,} tokens",
        ]

    @property
    def scoring(self) -> bool:
        """What was read is being scored by a second pass."""
        return self.engine.kv.scoring

    @property
    def reads_again(self) -> int:
        """Tokens that `auto` would read again with the next question."""
        if not self.fed or self.rereads or self.reuse != "auto":
            return 0
        if self._recalls() and self.recall.ready(len(self.fed)):
            has = self.recall.has(self.fed)
            return len(self.fed) - has if self._lacks(has) else 0
        return len(self.fed) if self._decide().reuse == "refresh" else 0

    @property
    def room(self) -> int:
        """Positions left in the model's context, the pending token already counted."""
        return self.max_context - len(self.fed or self.known) - (self.pending_token is not None)

    @answers
    def ask(
        self,
        question: str,
        max_tokens: int = 256,
        temperature: float = 0.0,
        *,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        stop: str | Sequence[str] = (),
        progress: Callable[[int, int], None] | None = None,
        notice: Callable[[str], None] | None = None,
    ) -> Generator[str, None, None]:
        """Ask about the attached documents; yield the text of the answer piece by piece.

        The answer ends before the first of the texts in `stop`. `progress(done, total)` is called
        between chunks of the prompt, `notice(line)` with each warning. Closing the iterator early
        is the same as `cancel`. From its first piece until it ends, is closed or is collected,
        everything else that would change the chat is refused (see `minikv.chat.guard`).

        Raises ContextError if the prompt does not fit (it is never cut), UsageError, Interrupted,
        NumericsError. After an error while the prompt was read, the chat is as it was before the
        question. After an error in the answer, the part that was written stays.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p)
        checks.whole("max_tokens", max_tokens, 1)
        checks.function("progress", progress)
        checks.function("notice", notice)
        check_text(question, "the question")
        if not question.strip():
            raise UsageError("the question is empty", "ask something in words")
        texts = stop_texts(stop)
        return self._cancellable(
            self._turn(question, max_tokens, sampling, texts, progress, notice)
        )

    ask_async = in_background(ask)

    @answers
    def continue_answer(
        self,
        max_tokens: int = 256,
        temperature: float = 0.0,
        *,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        stop: str | Sequence[str] = (),
        notice: Callable[[str], None] | None = None,
    ) -> Generator[str, None, None]:
        """Go on with an answer that ended at its `max_tokens` or was stopped; yield what follows.

        The tokens are those of a larger `max_tokens` from the beginning. The turn grows: its
        answer and its record are those of the whole answer, and `undo` takes back all of it.
        Arguments and errors are those of `ask`. Raises UsageError if there is no such answer.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p)
        checks.whole("max_tokens", max_tokens, 1)
        checks.function("notice", notice)
        texts = stop_texts(stop)
        self.continuable()
        return self._cancellable(self._longer(max_tokens, sampling, texts, notice))

    @answers
    def verify(
        self, progress: Callable[[int, int], None] | None = None
    ) -> Generator[str, None, None]:
        """Write the last answer again, every token of it from all that was read and not from the
        rows under the budget, with its sampling and seed; yield its text. `verified` then says
        where the two part. The chat stays as it is.

        `progress(done, total)` is called with every token. Raises UsageError where there is no such
        answer, or no tier that has its question.
        """
        checks.function("progress", progress)
        return self._cancellable(self._verify(progress))

    def _verify(self, progress: Callable[[int, int], None] | None) -> Generator[str, None, None]:
        self.verified = None

        def stopped() -> bool:
            return self._cancelled

        self.verified = yield from rewritten(
            self.engine,
            self.tokenizer,
            self.recall,
            [*self.fed, *([] if self.pending_token is None else [self.pending_token])],
            self.report,
            progress,
            stopped,
        )

    def continuable(self) -> None:
        """Raise the UsageError that `continue_answer` would raise."""
        same = self.report is None or (
            self.report.policy == self.eviction.policy
            and self.report.policy_options == self.eviction.options_record()
            and self.report.budget == self.eviction.budget_record()
        )
        refusal(
            self.report,
            pending=self.pending_token is not None,
            same=same,
            full=len(self.fed) >= self.max_context,
        )

    def _turn(
        self,
        question: str,
        max_tokens: int,
        sampling: Sampling,
        stop: tuple[str, ...],
        progress: Callable[[int, int], None] | None,
        notice: Callable[[str], None] | None,
    ) -> Generator[str, None, None]:
        began = perf_counter()
        self.guard.question = question
        warnings: list[str] = []

        def warn(line: str) -> None:
            line = self.words(line)
            warnings.append(line)
            if notice is not None:
                notice(line)

        message = user_message(self.pending, question)
        self._refuse_by_bytes(message.content)
        messages = [*self.messages, message]
        feed, decision = self._feed(messages)
        reused = 0 if feed.anew else len(self.fed)
        if not self._fits(feed):
            raise self._does_not_fit(len(feed.ids), "needs", reused)
        self._refuse_without_tier(feed.recalled, len(feed.ids) + max_tokens)
        self._warn_before(question, feed, decision, warn)
        for line in self._new_notices():
            warn(line)

        answer = Answer(self.tokenizer.stream(), stop)
        before = self._set_aside()
        known = self.engine.kv.stats()
        self.rereading = self._again(feed, decision)
        try:
            self._tell_scoring(feed, warn)
            feed, read = self._read(feed, messages, max_tokens, progress, warn)
        finally:
            self.rereading = False
            self.recall.scored()
        ids, reused = feed.ids, feed.given if feed.anew else len(self.fed)
        if feed.recalled:
            line = self.recall.keep(ids)
            if line:
                warn(line)

        # The prompt is in the cache. From here on the turn counts, also if the answer fails.
        self.history.keep(self.turn, before)
        if feed.anew:
            self.fed, self.shaped_by = [], None
        if read.blind and self.shaped_by is None:
            self.shaped_by = 0
        self.fed += ids
        self.known, self.pending_token, self.rereads = [], None, False
        self.turn += 1
        self.messages = messages
        self.documents += self.pending
        attached = tuple(self.pending)
        self.pending, self.undone = [], []

        try:
            known = self._measure(known)
            self._mark(known)
            self._warn_after(known, bool(attached), warn)
            lost = read.fidelity
            if lost is not None and lost.bound is not None and not lost.bounded:
                warn(_over_bound(lost))
            # Where the user wanted no reading again, there is nothing to recall either.
            anew = Anew(self.refresh_every * feed.recalled, lost.budget if lost else None)
            yield from self._write(answer, read.logits, max_tokens, sampling, began, anew)
        except GeneratorExit:
            answer.reason = answer.reason or "user"
            raise
        finally:
            answer.close()
            self.messages = [*messages, Message("assistant", answer.text)]
            late = self._new_notices()
            warnings += late
            stats = self._measure(known)
            self._mark(stats)
            total_s = perf_counter() - began
            self.report = self._report(
                stats,
                feed,
                read,
                reused,
                answer,
                warnings,
                _how(sampling, max_tokens, stop),
                Seconds(
                    load=self.facts.load_s,
                    compile=None,
                    first_token=total_s if answer.first_s is None else answer.first_s,
                    prefill=read.seconds,
                    evict=read.evict_s,
                    decode=answer.decode_s,
                    total=total_s,
                    refresh=answer.passes_s,
                    fidelity=read.fidelity_s,
                ),
                Rates(
                    prefill_tok_s=feed.tokens / read.seconds if read.seconds else None,
                    decode_tok_s=answer.rate,
                    baseline_decode_tok_s=self.baseline_tok_s,
                ),
            )
            self.turns.append(Turn(question, answer.text, attached, self.report))
            if notice is not None:  # the turn is closed: what the caller does here may fail
                for line in late:
                    notice(line)

    def _read(
        self,
        feed: PromptPlan,
        messages: list[Message],
        room: int,
        progress: Callable[[int, int], None] | None,
        warn: Callable[[str], None],
    ) -> tuple[PromptPlan, Read]:
        """Read what `feed` says; or, if `skip` stops that, only what is new; or, if the tier is
        damaged, what it no longer has, too. Returns what was read."""

        def stopped() -> bool:
            return self._cancelled or self._skips

        bound = self.quality if self.eviction.evicts else 0.0
        measuring = Measuring(self.tokenizer.vocab, self.fidelity, bound)
        try:
            read = prompt_plan.read(self.engine, feed, room, progress, stopped, measuring)
        except TierError as error:
            warn(self.recall.failed(error))
            feed, decision = self._feed(messages)
            if not self._fits(feed):
                raise self._does_not_fit(len(feed.ids), "needs") from None
            self.rereading = self._again(feed, decision)
            self._tell_scoring(feed, warn)
            return self._read(feed, messages, room, progress, warn)
        except Interrupted:
            if self._cancelled or not self._skips:  # `progress` may raise it, too
                raise
            instead = self._continued(messages)
            if not self._fits(instead):
                raise
        else:
            self._skips = False  # it came when all was read
            return feed, read
        self.rereading = False  # first: from here on `skip` is `cancel`
        self._skips = False
        warn("stopped reading again: this answer comes from the cache as it is")
        return instead, prompt_plan.read(self.engine, instead, room, progress, stopped, measuring)

    def _again(self, feed: PromptPlan, decision: Decision | None) -> bool:
        """Whether `auto` reads the conversation again."""
        again = feed.recalled and self._lacks(feed.given)
        return decision is not None and (feed.reuse == "refresh" or again)

    def _lacks(self, tokens: int) -> bool:
        """Whether so many first tokens are less than what the last question read."""
        if self.report is None:
            return False
        last = self.report.tokens
        return tokens < last.prompt_reused + last.prompt_new

    def _fits(self, feed: PromptPlan) -> bool:
        """Whether the prompt and one more token fit the model's context."""
        return (0 if feed.anew else len(self.fed)) + len(feed.ids) + 1 <= self.max_context

    def _write(
        self,
        answer: Answer,
        logits: Tensor | None,
        max_tokens: int,
        sampling: Sampling,
        began: float,
        anew: Anew,
    ) -> Generator[str, None, None]:
        """Write the answer until it ends; `answer.reason` then says why. `logits` are those of the
        last token that was read, None if the pending token comes first."""
        vocab, recalls = self.tokenizer.vocab, False
        while True:
            if self._cancelled:
                answer.reason = "user"
                break
            started = perf_counter()
            if self.pending_token is None:
                assert logits is not None, "there is no token to begin with"
                token = pick(logits, vocab, sampling, self.seed, len(self.fed))
            elif recalls := anew.due(answer.generated) and self.recall.tier is not None:
                room = max_tokens - answer.generated
                logits = self._recalled(self.pending_token, room, anew.rows)
                if logits is None and self._cancelled:
                    answer.reason = "user"
                    break
                if logits is None:  # the tier failed
                    answer.passes_s += perf_counter() - started
                    started, recalls = perf_counter(), False
                    token = self._next(self.pending_token, sampling, ahead=False)
                    answer.steps += 1
                else:
                    token = pick(logits, vocab, sampling, self.seed, len(self.fed))
                    answer.passes += 1
            else:
                after = answer.generated + 1
                ahead = after < max_tokens and not anew.due(after)
                token = self._next(self.pending_token, sampling, ahead=ahead)
                answer.steps += 1
            if answer.first_s is None:
                answer.first_s = perf_counter() - began
            elif recalls:
                answer.passes_s += perf_counter() - started
            else:
                answer.decode_s += perf_counter() - started
            if token in self.tokenizer.stop_ids:
                answer.reason = "eos"
                break
            piece = answer.push(token)
            self.pending_token = token  # only now: a token without a text is in no transcript
            if answer.stopped:
                answer.reason = "stop"
                if answer.overshot:  # as a stop token, it is not fed
                    self.pending_token = None
            if piece:
                yield piece
            if answer.stopped:
                break
            if answer.generated == max_tokens:
                answer.reason = "length"
                break
            if len(self.fed) == self.max_context:
                answer.reason = "context"
                break
        rest = answer.finish()
        if rest:
            yield rest

    def _longer(
        self,
        more: int,
        sampling: Sampling,
        stop: tuple[str, ...],
        notice: Callable[[str], None] | None,
    ) -> Generator[str, None, None]:
        began = perf_counter()
        self.continuable()  # something may have happened since it was asked for
        turn, known = self.turns[-1], self.engine.kv.stats()
        assert self.pending_token is not None
        if self.refresh_every:
            self._refuse_without_tier(self._recalls(), len(self.fed) + 1 + more)
        lost = turn.report.fidelity
        anew = Anew(self.refresh_every, lost.budget if lost else None)
        ids = [*self.fed, self.pending_token][-turn.report.tokens.generated :]
        answer = Answer.resumed(self.tokenizer.stream(), stop, ids, turn.answer)
        answer.first_s = turn.report.time_s.first_token
        most = answer.generated + more
        self.undone = []
        try:
            yield from self._write(answer, None, most, sampling, began, anew)
        except GeneratorExit:
            answer.reason = answer.reason or "user"
            raise
        finally:
            answer.close()
            late, stats = self._new_notices(), self._measure(known)
            self.report = continued(
                turn.report,
                stats,
                answer,
                perf_counter() - began,
                seed=self.seed,
                sampling=_how(sampling, most, stop),
                memory=device_memory(self.facts.device),
                warnings=late,
            )
            self.messages[-1] = Message("assistant", answer.text)
            self.turns[-1] = replace(turn, answer=answer.text, report=self.report)
            self.curve.pop()
            self._mark(stats)
            if notice is not None:
                for line in late:
                    notice(line)

    def _set_aside(self) -> ChatSnapshot | None:
        """A snapshot for `undo`; None if none is wanted or it would be too large."""
        if not self.history.wants(self.engine.kv.stats().held_bytes):
            return None
        # Without memory for the copy, the question is still answered.
        with contextlib.suppress(MemoryError, RuntimeError):
            return self.snapshot()
        return None

    def _measure(self, known: CacheStats) -> CacheStats:
        """The cache's figures, or `known` if there is no memory to count them. Must not fail,
        because it closes a turn."""
        try:
            return self.engine.kv.stats()
        except (MemoryError, RuntimeError):
            return replace(known, seen=self.engine.kv.position)

    def _mark(self, stats: CacheStats) -> None:
        self.curve.append((stats.seen, stats.held_bytes, stats.full_bytes))

    def _ids(
        self, compose: Callable[[Sequence[Message]], list[int]], messages: Sequence[Message]
    ) -> list[int]:
        """`compose` of the messages; of long ones so that `cancel` stops it. Raises Interrupted,
        and MemoryShortError where the tokenizer's library would end the process."""
        follows = compose == self.template.following
        new = messages[-1:] if follows else messages
        size = sum(len(message.content.encode("utf-8", "surrogatepass")) for message in new)
        if size < _LONG:
            return compose(messages)
        free = self.recall.free
        if free is not None and free < size * _TOKENIZING:
            raise MemoryShortError(
                f"tokenizing {size >> 10:,} KiB of text takes about {size * _TOKENIZING >> 20:,} "
                f"MiB of memory, and {free >> 20:,} MiB are free",
                "ask about a shorter document, or free memory",
            )
        return stoppable(lambda: compose(messages), lambda: self._cancelled)

    def _feed(self, messages: list[Message]) -> tuple[PromptPlan, Decision | None]:
        """What to feed so that the cache has seen `messages` up to where the answer begins, and the
        decision of `--reuse auto`, if there was one."""
        pinned = len(self.start()) if self.pin_system and self.system else 0
        recalls = self._recalls()
        if not self.fed:
            ids = self._ids(self.template.opening, messages)
            if recalls and self.recall.ready(len(ids)):
                if self.known:
                    ids = self.known + self._ids(self.template.following, messages)
                given = self.recall.given(ids)
                mode = "recall" if given else "refresh" if self.turns else "once"
                begins = self._last_turn(ids)
                return PromptPlan(mode, (ids,), True, pinned, True, given, begins), None
            asked = self._asked()
            if not self._blind:
                mode, begins = "refresh" if self.turns else "once", self._last_turn(ids)
                plan = PromptPlan(mode, (ids,), True, pinned, begins=begins, asks=not asked)
                return plan, None
            cut = reuse.parts(
                ids, asked, _with(lambda m: self._ids(self.template.opening, m), messages)
            )
            mode = "blind" if len(cut) > 1 else "once"
            return PromptPlan(mode, cut, True, pinned, asks=True), None
        decision = None
        feed = self._continued(messages)
        whole = self.fed + feed.ids
        if recalls and self.recall.ready(len(whole)):
            given = self.recall.given(whole)
            mode = "recall" if given else "refresh"
            decision = Decision(mode) if self.reuse == "auto" and not self.rereads else None
            return PromptPlan(mode, (whole,), True, 0, True, given, len(self.fed)), decision
        mode = "refresh" if self.rereads else self.reuse
        if mode in ("auto", "recall"):  # there is no tier
            decision = self._decide()
            mode = decision.reuse
        if mode == "refresh":
            whole = self._ids(self.template.opening, messages)
            if decision is None or len(whole) < self.max_context:
                begins = self._last_turn(whole)
                return PromptPlan("refresh", (whole,), True, pinned, begins=begins), decision
            decision = None
        if self._blind and self.pending:
            owed = [] if self.pending_token is None else [self.pending_token]
            again = _with(lambda m: owed + self._ids(self.template.following, m), messages)
            cut = reuse.parts(feed.ids, self._asked()[-1:], again)
            return PromptPlan("blind", cut, False, asks=True), None
        return feed, decision

    def _last_turn(self, ids: Sequence[int]) -> int:
        """Where the last turn begins in the whole conversation: what it has of earlier turns, as
        far as it is what they were read and written as."""
        seen = self.turns[-1].report.tokens.seen_total if self.turns else 0
        return reuse.shared((self.fed or self.known)[:seen], ids)

    @property
    def recalls(self) -> bool:
        """Whether the next question can be answered from a tier, if there is one."""
        return self.reuse in ("auto", "recall") and self.engine.kv.recalls is None

    def _recalls(self) -> bool:
        """Whether the next question is to be answered from a tier, where one can be had. Raises
        UsageError if that was asked for and the policies cannot."""
        # Without eviction the cache has all, but for one that is gone or that another policy left.
        gone = self.recall.tokens > 0 and (not self.fed or self.engine.kv.stats().gaps)
        if not (self.eviction.evicts or gone) or self.reuse not in ("auto", "recall"):
            return False
        why = self.engine.kv.recalls
        if self.reuse == "recall" and (why or self.recall.kind == "none"):
            raise UsageError(
                f'`reuse="recall"` cannot be had: {why or _NO_TIER}',
                '`reuse="auto"` reads everything again instead',
            )
        return True

    def _continued(self, messages: list[Message]) -> PromptPlan:
        """Only what is new, behind what the cache has seen."""
        owed = [] if self.pending_token is None else [self.pending_token]
        ids = owed + self._ids(self.template.following, messages)
        return PromptPlan("once", (ids,), False, asks=not self.pending)

    @property
    def _scores_twice(self) -> bool:
        """The policy reads what it scores a second time."""
        prompt = self.engine.kv.prompt_policy
        return prompt is not None and prompt.evidence.second_pass

    @property
    def _blind(self) -> bool:
        """Documents are evicted before a question about them is seen."""
        return self.reuse == "blind" or (self.reuse == "auto" and self._scores_twice)

    def _asked(self) -> list[tuple[int, str]]:
        """(index in the messages, text of its documents) of each message with documents, the next
        one included."""
        first = len(self.messages) - 2 * len(self.turns)
        brought = [*(turn.documents for turn in self.turns), self.pending]
        return [
            (first + 2 * n, "".join(document.rendered() for document in documents))
            for n, documents in enumerate(brought)
            if documents
        ]

    def _decide(self) -> Decision:
        """What `auto` does for the next question."""
        if not self.documents or not self.engine.kv.stats().evicted:
            return Decision("once")
        prompt, *_ = self.eviction.policies()
        asks = prompt is not None and prompt.evidence.asks
        return reuse.decide(self.eviction.policy, asks, self.keeps_cache, self.recall.why)

    def _next(self, token: int, sampling: Sampling, *, ahead: bool) -> int:
        """Feed the pending token and pick the next one. If the engine fails, the cache's position
        says whether the token was counted."""
        try:
            return self.engine.next(token, self.tokenizer.vocab, sampling, self.seed, ahead=ahead)
        finally:
            if self.engine.kv.position > len(self.fed):
                self.fed.append(token)
                self.pending_token = None

    def _recalled(self, token: int, room: int, rows: int | None) -> Tensor | None:
        """Feed the pending token by a pass over all that was read and the answer so far, for which
        the rows under the budget are chosen anew; its logits. None if it was stopped or the tier
        failed: then the cache has not changed."""

        def between_chunks(done: int, total: int) -> None:
            if self._cancelled:
                raise Interrupted("stopped", "the answer ends here")

        whole = [*self.fed, token]
        self.recall.given(whole)
        try:
            begins = self.engine.kv.last_turn
            return self.engine.recall(whole, between_chunks, room, rows, begins)
        except Interrupted:
            return None
        except TierError as error:
            self.engine.notices.append(self.recall.failed(error))
            return None
        finally:
            if self.engine.kv.position > len(self.fed):
                self.fed, self.pending_token = whole, None
                if line := self.recall.keep(whole):
                    self.engine.notices.append(line)

    def _refuse_without_tier(self, recalled: bool, tokens: int) -> None:
        """Raise UsageError if a setting needs a tier for so many tokens and there is none.
        recalled: the prompt is."""
        named = [name for name in ("refresh_every", "quality") if getattr(self, name)]
        if not named:
            return
        tokens = min(tokens, self.max_context) if self.refresh_every else 0
        if recalled and self.recall.ready(tokens):
            return
        why = self.recall.why or "none fits"
        if not self.eviction.evicts:
            why = "nothing is evicted"
        elif self.reuse not in ("auto", "recall"):
            why = f'`reuse="{self.reuse}"`'
        raise UsageError(
            f"`{named[0]}={getattr(self, named[0])}` needs all that was read in a tier, and there "
            f"is none ({why})",
            f"`{named[0]}=0` answers without",
        )

    def _new_notices(self) -> list[str]:
        """What the engine has to say about itself, each line once."""
        lines = self.engine.notices[self._noticed :]
        self._noticed += len(lines)
        return lines

    def _refuse_by_bytes(self, content: str) -> None:
        """Raise ContextError, without tokenizing, for a text that cannot fit."""
        size = len(content.encode())
        if size <= self.room:
            return  # even at a byte per token it would fit; the bound is not worth computing
        if self._longest is None:
            self._longest = longest_token(self.tokenizer) or math.inf
        least = int(size / self._longest)
        if least > self.room:
            raise self._does_not_fit(least, "needs at least")

    def _does_not_fit(self, tokens: int, verb: str, fed: int | None = None) -> ContextError:
        """The error for a prompt of `tokens` tokens. fed: positions that the prompt does not
        replace, all by default."""
        fed = len(self.fed) if fed is None else fed
        room = max(self.max_context - fed - 1, 0)
        used = f", {fed:,} of them used by this chat" if fed else ""
        choices = ["a shorter document", "a model with a longer context"]
        if self.fed:
            choices.insert(0, "a new conversation (`chat.reset()`)")
        return ContextError(
            f"the prompt {verb} {tokens:,} tokens and {room:,} are left: this model was trained "
            f"for {self.max_context:,} positions{used}",
            f"eviction does not extend that, and nothing was cut; choose {', or '.join(choices)}",
        )

    def _warn_before(
        self,
        question: str,
        feed: PromptPlan,
        decision: Decision | None,
        warn: Callable[[str], None],
    ) -> None:
        if self.turn == 0:
            for note in self.template.notes:
                warn(note)
        for line in marker_lines(self.template, self.pending, question):
            warn(line)
        if (
            self.reuse == "blind"
            and feed.reuse == "once"
            and not self.turn
            and self.eviction.evicts
        ):
            warn('there is no document to evict beforehand: `reuse="blind"` changes nothing here')
        line = decision.why if decision is not None else ""
        about = decision and (decision.reuse, self.eviction.policy, self.keeps_cache)
        if line and about != self._told:
            self._told = about
            warn(line)

    def _tell_scoring(self, feed: PromptPlan, warn: Callable[[str], None]) -> None:
        """Say what a second pass over what is to be read takes. Raises MemoryShortError where it
        cannot be had."""
        if feed.recalled or not self._scores_twice:
            return
        kv = self.engine.kv
        if not any((kv.words.first, kv.words.later, kv.words.answer)):
            kv.words = repeating.wording(self.tokenizer, self.template)
        position = 0 if feed.anew else kv.position
        cost = repeating.scoring(self.engine, feed.parts, position, feed.asks)
        if not cost.tokens:
            return
        policy = self.eviction.policy
        said = cost.line(in_file=repeating.keep(self.recall, policy, cost))
        line = f"{policy} scores what is read by having it repeated: {said}"
        if self._blind and self.reuse == "auto":
            line = (
                f'`reuse="auto"` evicts before the question is seen, so that one cache serves all '
                f"questions; {policy}: {said}"
            )
        warn(line)

    def _warn_after(
        self, stats: CacheStats, had_documents: bool, warn: Callable[[str], None]
    ) -> None:
        if stats.shaped and self.shaped_by is None:
            self.shaped_by = self.turn
        rows = stats.budget_rows
        # That a short document fits the default budget is what one expects.
        chosen = self.eviction.evicts and self.eviction.budget != read_budget(DEFAULT_BUDGET)
        if had_documents and chosen and rows is not None and rows >= stats.seen:
            warn(
                f'`budget="{self.eviction.budget}"` ({rows:,} tokens per head) is not below this '
                f"prompt ({stats.seen:,} tokens): nothing was evicted"
            )

    def _report(
        self,
        stats: CacheStats,
        feed: PromptPlan,
        read: Read,
        reused: int,
        answer: Answer,
        warnings: list[str],
        sampling: Mapping[str, object],
        seconds: Seconds,
        rates: Rates,
    ) -> TurnReport:
        return TurnReport(
            turn=self.turn,
            policy=self.eviction.policy,
            policy_options=self.eviction.options_record(),
            budget=self.eviction.budget_record(),
            kernels=self.facts.kernels,
            dtype=self.facts.dtype,
            kv_dtype=self.facts.kv,
            weights=self.facts.form,
            device=self.facts.device,
            tokens=Tokens(
                prompt_new=feed.tokens,
                prompt_reused=reused,
                generated=answer.generated,
                seen_total=stats.seen,
                evicted_total=stats.evicted,
                kept_mean=stats.kept_mean,
                kept_min=stats.kept_min,
                kept_max=stats.kept_max,
            ),
            kv_bytes=KvBytes(
                full=stats.full_bytes,
                held=stats.held_bytes,
                allocated=stats.allocated_bytes,
                peak_prefill=max(read.peak, stats.peak_bytes),
                policy_state=stats.state_bytes,
                tier=self.recall.nbytes,
            ),
            time_s=seconds,
            rate=rates,
            loss=_loss(read),
            shaped_by_turn=self.shaped_by,
            stop_reason=answer.reason or "error",
            seed=self.seed,
            sampling=sampling,
            device_mem=device_memory(self.facts.device),
            warnings=tuple(warnings),
            reuse=feed.reuse,
            tier=self.recall.place,
            refreshes=answer.passes,
            fidelity=read.fidelity,
        )


class _Closed:
    """In place of the engine of a chat that was closed."""

    def __getattr__(self, name: str) -> object:
        raise closed()


_NO_TIER = '`tier="none"`'


def _over_bound(lost: Fidelity) -> str:
    """The warning that no budget was good enough."""
    much = "not known" if lost.kl_first_token is None else f"{lost.kl_first_token:.2g} nats"
    return (
        f"`quality={lost.bound:g}` is not met under the whole budget of {lost.budget:,} tokens per "
        f"head: what the first token loses is {much}"
    )


def _loss(read: Read) -> Loss:
    """What the turn record says of the loss."""
    if read.gaps:
        return Loss(None, None, None, UNKNOWN)
    return Loss(*read.lost, None if read.lost[0] is None else "window")


def _how(sampling: Sampling, max_tokens: int, stop: tuple[str, ...]) -> dict[str, object]:
    """How an answer was written, for its record."""
    return {**asdict(sampling), "max_tokens": max_tokens, "stop": list(stop)}


def _with(
    render: Callable[[list[Message]], list[int]], messages: Sequence[Message]
) -> Callable[[int, str], list[int]]:
    """A function (index, content) -> `render` of the messages with that message's content
    replaced."""

    def again(at: int, content: str) -> list[int]:
        changed = list(messages)
        changed[at] = Message(changed[at].role, content)
        return render(changed)

    return again
