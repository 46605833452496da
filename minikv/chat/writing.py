"""Writing an answer: one token after another, until it ends."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from minikv.cache.tier_rows import TierError
from minikv.chat.answer import Anew, Answer, AnswerSettings
from minikv.chat.protocols import Tokenizer
from minikv.chat.recall import Recall
from minikv.chat.token_log import TokenLog
from minikv.engine.engine import Engine
from minikv.engine.sampling import WINDOW, pick
from minikv.errors import Interrupted


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes answers after the tokens of `log`, and adds their tokens to it.

    anew: how often the rows under the budget are chosen anew. max_context: positions that the model
    was trained for. cancelled(): whether the answer must end.
    """

    engine: Engine
    tokenizer: Tokenizer
    recall: Recall
    log: TokenLog
    settings: AnswerSettings
    seed: int
    anew: Anew
    max_context: int
    cancelled: Callable[[], bool]

    def write(
        self, answer: Answer, logits: Tensor | None, began: float
    ) -> Generator[str, None, None]:
        """Write the answer until it ends, and yield its text. `answer.reason` then says why it
        ended.

        logits: of the last token that was read, float32 [V]; None if the pending token is fed
        first. began: when the turn began, as `perf_counter` seconds. Raises what a step raises; the
        log is correct also then.
        """
        log = self.log
        while True:
            if self.cancelled():
                answer.reason = "user"
                break
            if log.pending is None:
                assert logits is not None, "there is no token to begin with"
                token: int | None = self._pick(logits)
                answer.first_s = perf_counter() - began
            else:
                token = self._next(answer, log.pending)
            if token is None:
                answer.reason = "user"
                break
            if token in self.tokenizer.stop_ids:
                answer.reason = "eos"
                break
            piece = answer.push(token)
            if not answer.overshot:  # else it is not fed, as a stop token
                log.pending = token  # last: if `push` raises, the token is not in the transcript
            if answer.stopped:
                answer.reason = "stop"
            if piece:
                yield piece
            if answer.stopped:
                break
            if answer.generated == self.settings.max_tokens:
                answer.reason = "length"
                break
            if log.seen == self.max_context:
                answer.reason = "context"
                break
        continuable = answer.reason in ("length", "user") and log.seen < self.max_context
        rest = answer.finish(more=continuable)
        if rest:
            yield rest

    def _next(self, answer: Answer, pending: int) -> int | None:
        """Feed the pending token and return the one that follows; None if that was stopped."""
        if not self.anew.due(answer.generated) or self.recall.tier is None:
            after = answer.generated + 1
            ahead = after < self.settings.max_tokens and not self.anew.due(after)
            return self._step(answer, pending, ahead=ahead)
        began = perf_counter()
        logits = self._recall(pending, self.settings.max_tokens - answer.generated)
        if logits is None and self.cancelled():
            return None
        if logits is None:  # the tier failed
            answer.passes_s += perf_counter() - began
            return self._step(answer, pending, ahead=False)
        token = self._pick(logits)
        answer.passes += 1
        answer.passes_s += perf_counter() - began
        return token

    def _step(self, answer: Answer, pending: int, *, ahead: bool) -> int:
        """Do one decode step. If the engine fails, the cache's position says whether the pending
        token was counted."""
        began, engine, vocab = perf_counter(), self.engine, self.tokenizer.vocab
        try:
            token = engine.next(
                pending,
                vocab,
                self.settings.sampling,
                self.seed,
                ahead=ahead,
                recent=self._recent(),
            )
        finally:
            self.log.step(engine.kv.position)
        answer.steps += 1
        answer.decode_s += perf_counter() - began
        return token

    def _recall(self, pending: int, room: int) -> Tensor | None:
        """Recall the whole conversation, with the answer so far, so that the rows under the budget
        are chosen anew. Returns the logits, float32 [V]; None if it was stopped or the tier failed,
        and then the cache has not changed."""
        engine, whole = self.engine, [*self.log.fed, pending]

        def between_chunks(done: int, total: int) -> None:
            if self.cancelled():
                raise Interrupted("stopped", "the answer ends here")

        self.recall.given(whole)
        try:
            begins = engine.kv.last_turn
            return engine.recall(whole, between_chunks, room, self.anew.rows, begins)
        except Interrupted:
            return None
        except TierError as error:
            engine.notices.append(self.recall.failed(error))
            return None
        finally:
            if self.log.step(engine.kv.position) and (line := self.recall.keep(whole)):
                engine.notices.append(line)

    def _pick(self, logits: Tensor) -> int:
        settings, position = self.settings, self.log.seen
        ops = self.engine.kv.ops
        return pick(
            logits,
            self.tokenizer.vocab,
            settings.sampling,
            self.seed,
            position,
            ops,
            self._recent(),
        )

    def _recent(self) -> list[int]:
        """The last tokens of the conversation, if their logits are penalized."""
        if not self.settings.sampling.penalizes:
            return []
        return [*self.log.fed[-WINDOW:], *self.log.owed]
