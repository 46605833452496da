"""A chat: takes documents and questions, and yields answers as pieces of text.

`ChatSession` holds the state of one conversation and its operations. `ChatSession._turn` does the
steps of a turn in order: it plans the prompt (`planning`), reads it (`reading`), writes the answer
(`writing`) and closes the turn (`closing`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Literal, Self, cast

from torch import Tensor

from minikv import checks
from minikv.chat import composing, looping, reuse, shown, warnings
from minikv.chat.answer import Anew, Answer, AnswerSettings
from minikv.chat.background import in_background
from minikv.chat.cancelling import Cancelling
from minikv.chat.closing import against_full, measured, turn_report
from minikv.chat.composing import Composer
from minikv.chat.continuation import continued, refuse_continuation
from minikv.chat.conversation import Conversation, mark
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.facts import Facts, device_memory
from minikv.chat.fidelity import Measuring
from minikv.chat.fitting import fit_words
from minikv.chat.guard import Guard, answers, changes, closed
from minikv.chat.min_tokens import MinTokens
from minikv.chat.planning import Past, Planner, Wanted
from minikv.chat.protocols import Template, Tokenizer
from minikv.chat.reading import Reader
from minikv.chat.recall import Recall
from minikv.chat.report import AgainstFull, TurnReport
from minikv.chat.room import Room
from minikv.chat.snapshot import ChatSnapshot
from minikv.chat.stop import stop_texts
from minikv.chat.token_log import TokenLog
from minikv.chat.transcript import Document, Message, Source, Turn, user_message
from minikv.chat.undo import UNDO_BYTES, UndoHistory, refuse_undo
from minikv.chat.verify import Verification, rewritten
from minikv.chat.warnings import AutoLine, Warnings
from minikv.chat.writing import Writer
from minikv.engine.engine import Engine
from minikv.engine.sampling import Sampling
from minikv.errors import UsageError
from minikv.settings import MAX_TOKENS

_PUBLIC = (
    *("ask", "ask_async", "attach", "baseline_tok_s", "cancel", "check", "close", "configure"),
    *("continuable", "continue_answer", "conversation", "curve", "documents", "eviction"),
    *("fidelity", "finish", "fits", "kept", "keeps_cache", "known", "max_context", "messages"),
    *("pending", "quality", "reads_again", "recalls", "refresh", "refresh_every", "report"),
    *("reports", "rereading", "rereads", "reset", "restore", "reuse", "room", "seed", "shaped_by"),
    *("skip", "snapshot", "start", "system", "turn", "turns", "undo", "undo_turns", "undone"),
    *("verified", "verify"),
)
"""What `dir` shows of a chat. Its other attributes are for this repository."""

Fit = Callable[[EvictionConfig, int, int], int]
"""See `ChatSession`."""


class ChatSession:
    """One conversation over one cache.

    max_context: positions that the model was trained for. seed: of every random draw.

    These settings may be changed between turns:
    - reuse: what later questions find in the cache (see `minikv.chat.reuse`).
    - undo_turns: how many turns `undo` can take back. Each needs a copy of the cache in host
      memory; all copies together take at most `UNDO_BYTES`.
    - refresh_every: after every so many tokens of an answer, the rows under the budget are chosen
      anew from all tokens read and written; 0: never.
    - quality: if not 0, use the smallest budget with which the first token of the answer is at most
      this many nats from that of a full cache, but at most the user's budget.
    - fidelity: measure what eviction loses of every prompt that is recalled from a tier.

    These describe the conversation:
    - turns and reports: the turns so far, and their records.
    - undone: the turns that the last `undo` took back, until the next question.
    - verified: the result of the last `verify`; None if there is none.
    - shaped_by: the number of the question for which the cache was evicted; 0 if it was evicted
      before any question; None if neither.
    - keeps_cache: `auto` reads nothing again in this conversation.
    - rereading: `auto` is reading the conversation again, and `skip` would stop that.
    - known: if the cache is empty but a tier may have rows, the tokens of the conversation as they
      were read and written, as far as they are known. Tokenizing the text again may give others,
      for which the tier has no rows.
    - curve: (tokens seen, bytes that cache and tier take of the cache's memory, bytes of a full
      cache) after every prompt and every answer.
    - conversation: how often the chat was reset.
    - baseline_tok_s: decode speed of a full cache in tokens per second; None until it was measured
      in this chat.

    words: a function that rewrites warnings, which name remedies as Python in backquotes.
    fit(eviction, tokens, answer): the rows per head that `budget="auto"` stands for when the cache
    will have seen `tokens` tokens before an answer of `answer`; 0: all fit.
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
        fit: Fit = lambda eviction, tokens, answer: 0,
        own: Sampling | None = None,
        not_own: str = "",
    ) -> None:
        self.guard = Guard(self._settle)
        self.engine = engine
        self.tokenizer = tokenizer
        self.template = template
        self.max_context = max_context
        self.eviction = eviction or EvictionConfig.read()
        self.seed = seed
        self.system = system
        self.pin_system = pin_system
        self.facts = facts or Facts()
        self._noticed = 0  # how many notices of the engine the user has seen
        self.reuse = reuse
        self.recall = recall or Recall(engine.kv)
        self.refresh_every, self.quality, self.fidelity = refresh_every, quality, fidelity
        self.fit = fit
        self.own, self._not_own = own or Sampling(), not_own
        self.words: Callable[[str], str] = str
        self._min_tokens = MinTokens(tokenizer)
        self._cancelling = Cancelling()
        self._now = Conversation(0, UndoHistory(undo_turns, UNDO_BYTES), [])
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
        self._auto = AutoLine()
        self._cancelling.forget()
        self._now = Conversation(
            self.conversation + 1,
            self.history.emptied(),
            [Message("system", self.system)] if self.system else [],
            documents,
        )

    @property
    def conversation(self) -> int:
        """See the class."""
        return self._now.number

    @property
    def messages(self) -> list[Message]:
        """The conversation, with the question that is being answered."""
        return self._now.messages

    @property
    def pending(self) -> list[Document]:
        """Documents that come with the next question."""
        return self._now.pending

    @property
    def documents(self) -> list[Document]:
        """Documents that came with a question."""
        return self._now.documents

    @property
    def turn(self) -> int:
        """The number of the last question that was read; 0 before the first."""
        return self._now.turn

    @property
    def turns(self) -> list[Turn]:
        """See the class."""
        return self._now.turns

    @property
    def undone(self) -> list[Turn]:
        """See the class."""
        return self._now.undone

    @property
    def curve(self) -> list[tuple[int, int, int]]:
        """See the class."""
        return self._now.curve

    @property
    def shaped_by(self) -> int | None:
        """See the class."""
        return self._now.shaped_by

    @property
    def rereads(self) -> bool:
        """Whether the next question reads the whole conversation again."""
        return self._now.rereads

    @property
    def report(self) -> TurnReport | None:
        """The record of the last turn; None if there is none."""
        return self.turns[-1].report if self.turns else None

    @property
    def history(self) -> UndoHistory:
        """Copies of the chat from before its turns."""
        return self._now.history

    @property
    def _log(self) -> TokenLog:
        return self._now.log

    @property
    def fed(self) -> list[int]:
        """The ids of the tokens that the cache has seen."""
        return self._log.fed

    @property
    def pending_token(self) -> int | None:
        """The last token of an answer, which was not fed and begins the next prompt; None if there
        is none."""
        return self._log.pending

    @property
    def known(self) -> list[int]:
        """See the class."""
        return self._log.known

    @property
    def reuse(self) -> str:
        """What later questions find in the cache, one of `reuse.REUSES`. May be set between turns;
        raises UsageError for other values."""
        return self._reuse

    @reuse.setter
    def reuse(self, value: str) -> None:
        self._reuse = reuse.checked(value)

    @changes
    def refresh(self, *, wanted: bool = True) -> None:
        """Read the whole conversation again with the next question, and evict for that question,
        whatever `reuse` is. `wanted=False` cancels this. Raises UsageError if nothing was read yet.
        """
        if wanted and not self.fed:
            raise UsageError(
                "there is nothing to read again", "your next question reads all there is"
            )
        self._now = replace(self._now, rereads=wanted)

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
        return composing.start(self.template, self.system)

    @changes
    def configure(self, eviction: EvictionConfig) -> None:
        """Use another policy or budget from the next prompt on. Raises UsageError; then nothing
        changes."""
        self.engine.kv.configure(eviction.rules())
        self.eviction = eviction

    def check(self, eviction: EvictionConfig) -> None:
        """Raise the UsageError that `configure` would raise; change nothing."""
        self.engine.kv.check(eviction.rules())

    def snapshot(self) -> ChatSnapshot:
        """A copy of the chat between two turns. After `restore`, every answer is bit-identical.
        Copies the rows in use to host memory."""
        return self.guard.change(self._snapshot, inside=True)

    def _snapshot(self) -> ChatSnapshot:
        assert self._now.closing is None, "a turn is under way"
        return replace(self._without_cache(), held=self.engine.kv.snapshot())

    def _without_cache(self) -> ChatSnapshot:
        return ChatSnapshot(
            None,
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
        """Return to `snapshot`, with its policies, budget and seed. Between turns only.

        If the snapshot has no cache, the next question reads its conversation again. Raises
        UsageError if this chat cannot use its policies, and ValueError if its cache is not from
        this network. After these errors, and if memory runs out, nothing has changed.
        """
        restored = self._restored(snapshot)
        self._restore(snapshot, snapshot.eviction, snapshot.seed, restored)

    def _restored(self, snapshot: ChatSnapshot) -> Conversation:
        """The conversation of this snapshot."""
        owed = () if snapshot.pending_token is None else (snapshot.pending_token,)
        return Conversation(
            self.conversation,
            self.history.emptied(),
            list(snapshot.messages),
            list(snapshot.pending),
            list(snapshot.documents),
            TokenLog((*snapshot.fed, *owed) or snapshot.known, len(snapshot.fed)),
            len(snapshot.turns),
            list(snapshot.turns),
            curve=list(snapshot.curve),
            shaped_by=snapshot.shaped_by,
            rereads=snapshot.rereads,
        )

    def _restore(
        self, snapshot: ChatSnapshot, eviction: EvictionConfig, seed: int, restored: Conversation
    ) -> None:
        """Use the cache of the snapshot, and this policy, budget, seed and conversation from then
        on."""
        held, kv = snapshot.held, self.engine.kv
        under = None if eviction == snapshot.eviction else eviction.rules()
        if held is None:
            kv.restart(under or snapshot.eviction.rules())
        else:
            kv.restore(held, snapshot.eviction.rules(), under)
        self.eviction, self.seed, self._now = eviction, seed, restored
        self.baseline_tok_s = None
        self._cancelling.forget()

    @changes
    def undo(self, turns: int = 1) -> list[Turn]:
        """Take back the last `turns` turns, and return them. The documents of the first of them are
        put before the next question. Policy, budget and seed stay as they are now.

        If there is a copy of the cache from before them (see `undo_turns`), the first of their
        questions gets the same answer when it is asked again. If there is none, the next question
        reads the remaining conversation again. Raises UsageError if there are fewer turns; then
        nothing changes.
        """
        refuse_undo(turns, len(self.turns))
        finished = len(self.turns) - turns
        taken, baseline = self.turns[finished:], self.baseline_tok_s
        snapshot = self.history.before.get(finished)
        snapshot = snapshot or self._without_cache().before(finished, self.template)
        restored = self._restored(snapshot)
        rereads = restored.rereads or self.rereads or taken[0].report.reuse == "refresh"
        restored = replace(
            restored,
            history=self.history.until(finished),
            pending=[*restored.pending, *(d for d in self.pending if d not in restored.pending)],
            undone=taken,
            rereads=rereads and bool(restored.log.seen),
        )
        self._restore(snapshot, self.eviction, self.seed, restored)
        self.baseline_tok_s = baseline
        return taken

    def cancel(self) -> None:
        """Stop the running turn at the next safe point. Safe to call from a signal handler.

        While the prompt is read, `ask` raises Interrupted, and nothing is added. While the answer
        is written, the answer ends there and stays in the conversation.
        """
        self._cancelling.cancel()

    def skip(self) -> None:
        """As `cancel`. But while `auto` reads the conversation again, stop only that; the answer
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
            self._now = replace(self._now, history=self.history.emptied())

    def __enter__(self) -> Self:
        if self.guard.closed:
            raise closed()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __dir__(self) -> list[str]:
        return [*_PUBLIC]

    def __repr__(self) -> str:
        return shown.line("chat", [*(["closed"] if self.guard.closed else []), *self._about()])

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
        """Whether a second pass is scoring the prompt that was read."""
        return self.engine.kv.scoring

    @property
    def recalls(self) -> bool:
        """Whether `reuse` and the policies allow that the next question is answered from a tier."""
        return self.reuse in ("auto", "recall") and self.engine.kv.rules.cannot_recall is None

    @property
    def reads_again(self) -> int:
        """How many tokens `auto` would read again with the next question."""
        return self._planner().reads_again() if self.fed else 0

    @property
    def room(self) -> int:
        """Positions left in the model's context, with the pending token counted as used."""
        return self.max_context - len(self._log.ids)

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
        progress: Callable[[int, int], None] | None = None,
        notice: Callable[[str], None] | None = None,
    ) -> Generator[str, None, None]:
        """Ask about the attached documents; yield the text of the answer piece by piece.

        `temperature` "auto" is what the model's generation_config.json says, with its filters where
        they are off here. `repeat_penalty` divides the logits of the last 64 tokens of the
        conversation (see `minikv.engine.sampling.penalized`). The answer ends before the first of
        the texts in `stop`. `progress(done, total)` is called between chunks of the prompt,
        `notice(line)` with each warning. Closing the iterator early
        is the same as `cancel`. From its first piece until it ends, is closed or is
        garbage-collected, everything else that would change the chat raises UsageError (see
        `minikv.chat.guard`).

        Raises ContextError if the prompt does not fit (it is never cut), UsageError,
        MemoryShortError, Interrupted and NumericsError. After an error while the prompt was read,
        the chat is as it was before the question. After an error in the answer, the part that was
        written stays.
        """
        sampling = self._sampling(temperature, top_k, top_p, min_p, repeat_penalty)
        checks.whole("max_tokens", max_tokens, 1)
        checks.function("progress", progress)
        checks.function("notice", notice)
        checks.unicode("the question", question)
        if not question.strip():
            raise UsageError("the question is empty", "ask something in words")
        settings = AnswerSettings(sampling, max_tokens, stop_texts(stop))
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
        notice: Callable[[str], None] | None = None,
    ) -> Generator[str, None, None]:
        """Continue an answer that ended at its `max_tokens` or was stopped; yield the text that
        follows.

        The answer is then the same as with a larger `max_tokens` from the beginning. It stays one
        turn: its answer and its record are those of the whole answer, and `undo` takes back all of
        it. max_tokens: of the new part. Arguments and errors are those of `ask`. Raises UsageError
        if there is no such answer.
        """
        sampling = self._sampling(temperature, top_k, top_p, min_p, repeat_penalty)
        checks.whole("max_tokens", max_tokens, 1)
        checks.function("notice", notice)
        settings = AnswerSettings(sampling, max_tokens, stop_texts(stop))
        self.continuable()
        return self._cancelling.during(self._longer(settings, notice))

    @answers
    def verify(
        self, progress: Callable[[int, int], None] | None = None
    ) -> Generator[str, None, None]:
        """Write the last answer again, with its sampling and seed, but without eviction: every
        token attends to all rows of the tier. Yields its text. `verified` then says where the two
        answers differ. The chat itself does not change.

        `progress(done, total)` is called with every token. Raises UsageError if there is no answer,
        or no tier that has its question.
        """
        checks.function("progress", progress)
        return self._cancelling.during(self._verify(progress))

    def _verify(self, progress: Callable[[int, int], None] | None) -> Generator[str, None, None]:
        self.verified = None
        self.verified = yield from rewritten(
            self.engine,
            self.tokenizer,
            self.recall,
            self._log.tokens,
            self.report,
            progress,
            self._cancelling.cancelled,
        )
        self._note_check(self.verified)

    def _note_check(self, found: Verification) -> None:
        """Put what was found into the record of the last turn."""
        if not (found.parts or found.complete):
            return
        tokens = found.same if found.parts else None
        checked = AgainstFull(not found.parts, checked=True, tokens=tokens)
        last = self.turns[-1]
        last = replace(last, report=replace(last.report, against_full=checked))
        self._now = replace(self._now, turns=[*self.turns[:-1], last])

    def continuable(self) -> None:
        """Raise the UsageError that `continue_answer` would raise."""
        refuse_continuation(self.report, self.eviction, self._log, self.max_context)

    def _sampling(
        self,
        temperature: float | Literal["auto"],
        top_k: int,
        top_p: float,
        min_p: float,
        repeat_penalty: float,
    ) -> Sampling:
        """How the tokens of an answer are drawn. Raises UsageError."""
        if temperature != "auto":
            return Sampling(temperature, top_k, top_p, min_p, repeat_penalty)
        given, own = Sampling(0.0, top_k, top_p, min_p, repeat_penalty), self.own
        if self._not_own:
            line = f'{self._not_own}: `temperature="auto"` takes the likeliest token, as 0 does'
            self.engine.notices.append(line)
            self._not_own = ""  # said once
        return replace(
            given,
            temperature=own.temperature,
            top_k=top_k or own.top_k,
            top_p=own.top_p if top_p == 1.0 else top_p,
            min_p=min_p or own.min_p,
        )

    def _turn(
        self,
        question: str,
        settings: AnswerSettings,
        progress: Callable[[int, int], None] | None,
        notice: Callable[[str], None] | None,
    ) -> Generator[str, None, None]:
        """A question and its answer, in the order in which things happen."""
        began = perf_counter()
        self.guard.question = question
        turn_warnings = Warnings(self.words, notice)

        # Plan what to read, or refuse the question before anything is changed.
        message, room, planner = user_message(self.pending, question), self._room(), self._planner()
        room.refuse_text(message.content, self._min_tokens)
        messages = [*self.messages, message]
        coming = planner.coming(messages)
        chosen = self.eviction
        try:
            turn_warnings.tell_all(self._decide(self._log.seen + len(coming), settings.max_tokens))
            planner = self._planner()
            plan, decision = planner.plan(messages, coming)
            room.refuse(plan)
            most = plan.length + settings.max_tokens
            planner.refuse_without_tier(plan.recalled, most, self.refresh_every, self.quality)
            turn_warnings.tell_all(warnings.before(self.template, question, planner, plan))
            turn_warnings.tell_all(self._auto.lines(planner, decision))
            turn_warnings.tell_all(self._told())

            # Read it. After an error, the chat is as it was.
            answer = Answer(self.tokenizer.stream(), settings.stop)
            known = self.engine.kv.stats()
            snapshot = self.history.copy(self.snapshot, known.held_bytes)
            bound = self.quality if self.eviction.evicts else 0.0
            reader = Reader(
                self.engine,
                self.tokenizer,
                planner,
                room,
                settings.max_tokens,
                Measuring(self.tokenizer.vocab, self.fidelity, bound),
                self._cancelling,
                progress,
                turn_warnings.tell,
            )
            plan, read = reader.read(plan, decision, messages)
        except BaseException:
            self._set(chosen)
            raise
        reused = plan.given if plan.anew else self._log.seen
        fidelity, attached, log = read.fidelity, tuple(self.pending), self._log
        log = log.read(plan.ids, anew=plan.anew)
        begins = log.seen
        known = measured(self.engine.kv, known, log.seen)
        shaped_by = None if plan.anew else self.shaped_by
        if shaped_by is None and (read.blind or known.shaped):
            shaped_by = 0 if read.blind else self.turn + 1
        begun = replace(
            self._now,
            messages=messages,
            documents=[*self.documents, *attached],
            pending=[],
            undone=[],
            rereads=False,
            log=log,
            turn=self.turn + 1,
            curve=[*self.curve, mark(known, self.recall.here)],
            shaped_by=shaped_by,
        )
        # If the prompt was not recalled, the answer cannot recall anything either.
        anew = Anew(self.refresh_every * plan.recalled, fidelity.budget if fidelity else None)
        writer = self._writer(log, settings, anew)

        def closing() -> Conversation:
            ended = answer.ended(self.tokenizer, log.ids[begins:])
            stats = measured(self.engine.kv, known, log.seen)
            report = turn_report(
                begun.turn,
                plan,
                read,
                ended,
                stats,
                perf_counter() - began,
                reused=reused,
                settings=settings,
                seed=writer.seed,
                eviction=self.eviction,
                shaped_by=shaped_by,
                facts=self.facts,
                recall=self.recall,
                baseline_tok_s=self.baseline_tok_s,
                warnings=[
                    *turn_warnings.lines,
                    *self._new_notices(),
                    *self._looping(answer, settings),
                ],
            )
            turn = Turn(question, ended.text, attached, report)
            return begun.closed([*begun.turns, turn], stats, self.recall.here)

        # The prompt is in the cache. From here on the turn counts, even if the answer fails.
        self._now = replace(begun, closing=closing)
        try:
            self.engine.kv.forget_mark()
            self.history.keep(begun.turn - 1, snapshot)
            line = self.recall.keep(plan.ids) if plan.recalled else ""
            self.recall.scored()
            turn_warnings.tell_all(filter(None, [line]))
            turn_warnings.tell_all(warnings.after(fidelity))
            yield from writer.write(answer, read.logits, began)
        except GeneratorExit:
            answer.reason = answer.reason or "user"
            raise
        finally:
            self._settle()
            late = [*self._told(), *self._looping(answer, settings)]
            turn_warnings.say(late)  # last, because the caller's function may raise

    def _longer(
        self, settings: AnswerSettings, notice: Callable[[str], None] | None
    ) -> Generator[str, None, None]:
        """Continue the last answer. settings: `max_tokens` is that of the new part."""
        began = perf_counter()
        self.continuable()  # again, because the chat may have changed since `continue_answer`
        turn, known = self.turns[-1], self.engine.kv.stats()
        if self.refresh_every:
            planner, most = self._planner(), self._log.seen + 1 + settings.max_tokens
            planner.refuse_without_tier(planner.recalls(), most, self.refresh_every, self.quality)
        fidelity, log = turn.report.fidelity, self._log
        anew = Anew(self.refresh_every, fidelity.budget if fidelity else None)
        begins = len(log.ids) - turn.report.tokens.generated
        answer = Answer.resumed(
            self.tokenizer.stream(), settings.stop, log.ids[begins:], turn.answer
        )
        answer.first_s = turn.report.time_s.first_token
        settings = replace(settings, max_tokens=answer.generated + settings.max_tokens)
        writer = self._writer(log, settings, anew)
        begun = replace(self._now, undone=[], messages=self.messages[:-1], curve=self.curve[:-1])

        def closing() -> Conversation:
            ended = answer.ended(self.tokenizer, log.ids[begins:])
            stats = measured(self.engine.kv, known, log.seen)
            report = continued(
                turn.report,
                stats,
                ended,
                perf_counter() - began,
                seed=writer.seed,
                sampling=settings.record(),
                memory=device_memory(self.facts.device),
                against_full=against_full(stats, self.recall),
                warnings=[*self._new_notices(), *self._looping(answer, settings)],
            )
            longer = replace(turn, answer=ended.text, report=report)
            return begun.closed([*begun.turns[:-1], longer], stats, self.recall.here)

        self._now = replace(self._now, undone=[], closing=closing)
        try:
            yield from writer.write(answer, None, began)
        except GeneratorExit:
            answer.reason = answer.reason or "user"
            raise
        finally:
            self._settle()
            Warnings(str, notice).say([*self._told(), *self._looping(answer, settings)])

    def _settle(self) -> None:
        """Close the turn under way, and make conversation, cache and tier agree: an interrupt may
        have come between any two of them. Otherwise this does nothing."""
        if isinstance(self.engine, _Closed) or sys.is_finalizing():  # nobody asks any more
            return
        kv, log = self.engine.kv, self._log
        self._cancelling.rereading = False
        log.step(kv.put_right())
        lost = kv.position != log.seen and not kv.go_back_to_mark()
        if lost:
            self.engine.notices.append(_LOST)
        if self._now.closing is not None:
            self._now = self._now.closing()
        if lost:
            self.engine.reset()
            log.seen = 0
        kv.forget_mark()
        self.recall.settle()

    def fits(self, answer: int = MAX_TOKENS) -> str:
        """What `budget="auto"` does with the documents that wait, in words; "" under another
        budget. answer: tokens of the next answer."""
        if self.eviction.budget.unit != "auto" or not self.eviction.may_evict:
            return ""
        messages = [*self.messages, user_message(self.pending, "?")]
        tokens = self._log.seen + len(self._planner().coming(messages))
        return fit_words(self._rows_for(tokens, answer), tokens)

    def _rows_for(self, tokens: int, answer: int) -> int:
        """The rows that `budget="auto"` stands for when `tokens` tokens will have been read, 0 for
        all. Once rows were evicted, all of them do not fit any more."""
        before = int(self.eviction.budget.value) if self.engine.kv.stats().gaps else 0
        rows = self.fit(self.eviction, min(tokens, self.max_context), answer)
        return min(rows or before, before or rows)

    def _decide(self, tokens: int, answer: int) -> Iterator[str]:
        """Under `budget="auto"`, decide what stays when `tokens` tokens were read. Yields a line if
        something must go that did not have to before."""
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

    def _room(self) -> Room:
        return Room(self.max_context, self._log.seen, self.room)

    def _planner(self) -> Planner:
        return Planner(
            Past(self.turns, self.documents, self.pending, self._log),
            Wanted(
                self.reuse,
                self.rereads,
                self.keeps_cache,
                self.eviction,
                self.system if self.pin_system else "",
            ),
            self.engine.kv,
            self.recall,
            Composer(self.template, lambda: self.recall.free, self._cancelling.cancelled),
            self.max_context,
        )

    def _writer(self, log: TokenLog, settings: AnswerSettings, anew: Anew) -> Writer:
        return Writer(
            self.engine,
            self.tokenizer,
            self.recall,
            log,
            settings,
            self.seed,
            anew,
            self.max_context,
            self._cancelling.cancelled,
        )

    def _looping(self, answer: Answer, settings: AnswerSettings) -> list[str]:
        """A line for the user if the answer repeats itself."""
        return list(map(self.words, looping.line(answer.ids, settings.sampling, self.own)))

    def _new_notices(self) -> list[str]:
        """The engine's notices that the user has not seen."""
        return self.engine.notices[self._noticed :]

    def _told(self) -> list[str]:
        """The same, which the user sees now."""
        lines = self._new_notices()
        self._noticed += len(lines)
        return lines


_LOST = "a step failed, and nothing is cached: the next question reads the conversation again"


class _Closed:
    """Replaces the engine of a closed chat: every use raises UsageError."""

    def __getattr__(self, name: str) -> object:
        raise closed()
