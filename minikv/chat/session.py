"""A chat: takes documents and questions, and yields answers as pieces of text.

`ChatSession` has the operations on one conversation; `minikv.chat.turn` has its state and the steps
of a turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self, cast

from torch import Tensor

from minikv import checks
from minikv.chat.answer import (
    AnswerSettings,
    rewritten,
)
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.fitting import fit_words
from minikv.chat.report import amount, line
from minikv.chat.snapshot import (
    ChatSnapshot,
    Conversation,
)
from minikv.chat.stopping import Pieces, answers, changes, closed, in_background
from minikv.chat.thoughts import Say
from minikv.chat.transcript import (
    Document,
    Message,
    Source,
    TokenLog,
    Turn,
    system_messages,
)
from minikv.chat.turn import ClosedEngine, Turns
from minikv.engine.engine import Engine
from minikv.engine.sampling import Sampling
from minikv.errors import UsageError
from minikv.policies.parts import policy_columns
from minikv.settings import MAX_TOKENS

_OWN = {
    *("engine", "facts", "fed", "fit", "guard", "log", "own", "pending_token", "pin_system"),
    *("recall", "scoring", "template", "tokenizer", "words"),
}
"""The attributes that `dir` does not show: the command line uses them."""


class ChatSession(Turns):
    """One conversation over one cache.

    max_context: positions that the model was trained for. seed: for every random draw.

    These settings may be changed between turns:
    - reuse: what later questions find in the cache (see `minikv.chat.transcript`).
    - overflow: what happens to a question that does not fit the context. "refuse": it is refused.
      "drop": the oldest turns leave, but not their documents; the answer is that of a chat without
      these turns.
    - fidelity: measure what eviction loses of every prompt that is recalled from a tier.

    These describe the conversation:
    - turns and reports: the turns so far, and their records.
    - undone: the turns that the last `undo` removed, until the next question.
    - verified: the result of the last `verify`; None if there is none.
    - evicted_for_turn: the number of the question for which the cache was evicted; 0 if it was
      evicted before any question; None if neither.
    - forgets: the template leaves out the thoughts of earlier turns.
    - known: if the cache is empty but a tier may have rows, the tokens of the conversation as they
      were read and written, as far as known. Tokenizing the text again may give other tokens, for
      which the tier has no rows.
    - curve: (tokens seen, bytes of cache and tier in the cache's memory, bytes of a full cache)
      after every prompt and every answer.
    - conversation: how often the chat was reset.

    settings: the initial ones. eviction: if it differs from that of the settings. fit(eviction,
    tokens, answer): the rows per head that `budget="auto"` stands for when the cache will have seen
    `tokens` tokens before an answer of `answer`; 0: all fit. own: the model's own sampling, or why
    it has none. words: a function that rewrites warnings, in which remedies are Python code in
    backquotes.
    """

    @changes
    def reset(self, *, keep_documents: bool = False) -> None:
        """Forget the conversation and its cache. With `keep_documents`, the next question reads the
        documents again."""
        documents = [*self.documents, *self.pending] if keep_documents else []
        self.engine.reset()
        self.recall.clear()
        self.verified = None
        self._told = ""
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
        left = len(self.messages) - len(messages)
        same = left >= 0 and _texts(self.messages[: len(messages)]) == _texts(messages)
        # Rows that stayed without a tier were chosen for another question.
        stale = self.engine.kv.stats().gaps and not (self.recalls and self.recall.tokens)
        if same and not left:
            if not stale or self.reuse == "once" or self._plan_settings().blind:
                return
        elif same and left % 2 == 0 and left < 2 * len(self.turns):
            finished = len(self.turns) - left // 2
            before = self._now.before(finished, self.template)
            if before.log.ids:
                self._now = replace(
                    self._cut_to(before), pending=self.pending, rereads=self.rereads
                )
                return
        if stale:
            self.engine.reset()
            self.recall.clear()
        log = TokenLog(() if stale else self.log.ids, self.engine.kv.position, cut=True)
        now = Conversation(self.conversation + 1, tuple(messages), pending=self.pending, log=log)
        self._now = replace(now, noticed=self._now.noticed)
        self.verified, self._told = None, ""

    def _cut_to(self, before: Conversation) -> Conversation:
        """`before`, which has the first turns of the conversation, with their part of the cache. It
        is empty if later turns may have left a mark on these rows: on which of them stayed, on what
        a policy notes of them, or on a budget that is a share of what was read."""
        kv, finished = self.engine.kv, len(before.turns)
        last = before.report
        end = 0 if last is None else min(last.tokens.seen_total, len(before.log.ids))
        noted = policy_columns(kv.rules.prompt, kv.rules.step) or kv.rules.takes_share
        once = all(report.reuse == "once" for report in self.reports[finished:])
        if min(end, kv.position) and once and not noted and not kv.stats().gaps:
            kv.cut(min(end, kv.position))
        else:
            kv.forget(end)
        return replace(before, log=TokenLog(before.log.ids, kv.position))

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
        held = self.engine.kv.snapshot()
        return ChatSnapshot(held, self.eviction, self.seed, self._now.copied())

    @changes
    def restore(self, snapshot: ChatSnapshot) -> None:
        """Return to `snapshot`, with its policies, budget and seed. Between turns only.

        If the snapshot has no cache, the next question reads its conversation again. Raises
        UsageError if this chat cannot use its policies, and ValueError if its cache is not from
        this network. After these errors, and if memory runs out, nothing has changed.
        """
        restored, rules = self._now.restored(snapshot), snapshot.eviction.rules()
        if snapshot.held is None:
            self.engine.kv.reset(rules)
        else:
            self.engine.kv.restore(snapshot.held, rules)
        self.eviction, self.seed, self._now = snapshot.eviction, snapshot.seed, restored
        self._cancelling.forget()

    @changes
    def undo(self, turns: int = 1) -> list[Turn]:
        """Take back the last `turns` turns, and return them. The documents of the first of them are
        put before the next question. Policy, budget and seed stay as they are now.

        The next question recalls what is left of the conversation from the tier, or, without one,
        reads it again, if these turns may have left a mark on the cache; otherwise the cache is
        cut. Raises UsageError if there are fewer turns; then nothing changes.
        """
        now, count = self._now, len(self.turns)
        checks.whole("turns", turns)
        if turns < 1:
            raise UsageError(
                f"a number of turns is 1 or more, got {turns:,}", "`chat.undo()` or `chat.undo(2)`"
            )
        if not count:
            raise UsageError("there is no turn to undo", "ask something first")
        if turns > count:
            have = amount(count, "turn")
            raise UsageError(f"{turns:,} turns cannot be undone: this chat has {have}")
        before = self._cut_to(now.before(count - turns, self.template))
        waiting = [document for document in now.pending if document not in before.pending]
        pending, undone = [*before.pending, *waiting], now.turns[count - turns :]
        rereads = now.rereads and bool(before.log.seen)
        self._now = replace(before, pending=pending, undone=undone, rereads=rereads)
        return undone

    def cancel(self) -> None:
        """Stop the running turn at the next safe point. Safe to call from a signal handler.

        While the prompt is read, `ask` raises Interrupted, and nothing is added. While the answer
        is written, the answer ends there and stays in the conversation.
        """
        self._cancelling.cancel()

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
        if not isinstance(self.engine, ClosedEngine):
            self.engine.reset()
            self.recall.leave()
            self.engine = cast(Engine, ClosedEngine())

    def __enter__(self) -> Self:
        if self.guard.closed:
            raise closed()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_") and name not in _OWN]

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
        """How many tokens of the conversation the next question reads again, as far as they are
        known. The last answer does not count where only it is missing from the tier."""
        known = self._known(self._now, None)
        ids, fed, settings = known.tokens, self.log.seen, known.settings
        stored = known.recalls and known.tier.kind != "none"
        stored = stored or not (fed or self.recall.store is None)
        if ids and stored and not settings.blind and not settings.rules.cannot_recall:
            has, last = self.recall.has(ids, stored=True), self.reports[-1].tokens
            return len(ids) - has if has < last.prompt_reused + last.prompt_new else 0
        return len(ids) if known.rereads or not fed else 0

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
        checks.whole("max_tokens", max_tokens, 1)
        checks.whole("max_thoughts", max_thoughts, 0)
        checks.function("thinking", thinking)
        sampling = Sampling(0.0 if temperature == "auto" else temperature, **given)
        if temperature == "auto":
            if self._not_own:
                why = f'{self._not_own}: `temperature="auto"` takes the likeliest token, as 0 does'
                self.engine.notices.append(why)
                self._not_own = ""  # shown once
            sampling = replace(
                sampling,
                temperature=self.own.temperature,
                top_k=sampling.top_k or self.own.top_k,
                top_p=self.own.top_p if sampling.top_p == 1.0 else sampling.top_p,
                min_p=sampling.min_p or self.own.min_p,
            )
        return AnswerSettings(sampling, max_tokens, checks.stop_texts(stop), max_thoughts, thinking)

    def fits(self, answer: int = MAX_TOKENS) -> str:
        """What `budget="auto"` will do with the pending documents, in words; "" under another
        budget. answer: tokens of the next answer."""
        if self.eviction.budget.unit != "auto" or not self.eviction.may_evict:
            return ""
        base, question = self._continued("?")
        tokens = base.log.seen + len(question.ids)
        return fit_words(self._rows_for(tokens, answer), tokens)


def _texts(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in messages]
