"""Writing an answer: one token after another (`Writer`), as text (`Answer`), until a stop text, a
stop token or a limit ends it; and whether it repeats itself (`loops`)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from time import perf_counter

from torch import Tensor

from minikv import checks
from minikv.cache.tier_rows import TierError
from minikv.chat.protocols import TextStream, Tokenizer
from minikv.chat.recall import Recall
from minikv.chat.reuse import TokenLog
from minikv.engine.engine import Engine
from minikv.engine.sampling import WINDOW, Sampling, pick
from minikv.errors import Interrupted

_RUN = 32  # tokens in a row that were there before; rows of a table share fewer
_LAST = 128  # tokens at the end that are looked at
_LEAST = 48  # of them, in such runs


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How an answer is written: how tokens are drawn, how many at most, and the texts before which
    it ends."""

    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...]

    @staticmethod
    def read(
        given: Sampling,
        own: Sampling | None,
        max_tokens: int,
        stop: str | Sequence[str] | None,
    ) -> AnswerSettings:
        """Check the settings. own: the model's own sampling, if its temperature is wanted, and its
        filters where those of `given` are off. Raises UsageError."""
        checks.whole("max_tokens", max_tokens, 1)
        if own is not None:
            given = replace(
                given,
                temperature=own.temperature,
                top_k=given.top_k or own.top_k,
                top_p=own.top_p if given.top_p == 1.0 else given.top_p,
                min_p=given.min_p or own.min_p,
            )
        return AnswerSettings(given, max_tokens, checks.stop_texts(stop))

    def record(self) -> dict[str, object]:
        """The settings for the turn record."""
        return {
            **asdict(self.sampling),
            "max_tokens": self.max_tokens,
            "stop": list(self.stop),
        }


def _beginning(texts: Sequence[str], text: str) -> int:
    """The length of the longest end of `text` with which a stop text begins."""
    longest = max((len(stop) for stop in texts), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        end = text[-size:]
        if any(len(stop) > size and stop.startswith(end) for stop in texts):
            return size
    return 0


class Answer:
    """Takes tokens and returns pieces of text, until a stop text is complete, even over several
    tokens. Text that may be the beginning of a stop text is held back until that is decided. The
    result depends only on the text, not on how it is divided.

    text: the text returned so far. ids: its tokens so far; generated: how many. stopped: whether a
    stop text ended it. steps, decode_s: decode steps, and their seconds. passes, passes_s: how
    often the conversation was recalled instead of a step, and the seconds of that. first_s: seconds
    until the first token; None before it. reason: why the answer ended; "" before it ends.
    """

    def __init__(self, stream: TextStream, stop: Sequence[str] = ()) -> None:
        self.text = ""
        self.ids: list[int] = []
        self.stopped = False
        self.steps = self.passes = 0
        self.decode_s = self.passes_s = 0.0
        self.first_s: float | None = None
        self.reason = ""
        self._stream, self._stop = stream, stop
        self._whole = ""  # the text of all tokens
        self._before = 0  # characters of it before the last token
        self._shown = ""  # text of an earlier part, which is not returned again

    @classmethod
    def resumed(
        cls, stream: TextStream, stop: Sequence[str], ids: Iterable[int], shown: str
    ) -> Answer:
        """An answer that goes on after the tokens `ids`, of which the text `shown` was returned. No
        stop text is in it."""
        made = cls(stream, stop)
        made.ids = list(ids)
        text = made._whole = "".join(map(stream.push, made.ids))
        made._before = len(text)
        made.text = text[: len(text) - _beginning(stop, text)]
        # The rest of `shown` is text that `finish` returned at the end of the earlier part: what
        # was held back, and U+FFFD for an incomplete character.
        made._shown = shown[len(made.text) :]
        return made

    @property
    def generated(self) -> int:
        """How many tokens it has."""
        return len(self.ids)

    @property
    def overshot(self) -> bool:
        """Whether no text of the last token belongs to the answer."""
        return self.stopped and len(self.text) <= self._before

    @property
    def held(self) -> str:
        """The text that may be the beginning of a stop text."""
        return "" if self.stopped else self._whole[len(self.text) :]

    def push(self, token: int) -> str:
        """Add a token. Returns the text that is now certain to belong to the answer."""
        piece = self._stream.push(token)
        self.ids.append(token)
        self._before = len(self._whole)
        return self._add(piece)

    def finish(self, *, more: bool = False) -> str:
        """No more tokens come now: return the text that was held back. After a stop text that is
        "". more: the answer may be continued, so an incomplete character is still held back."""
        if self.stopped:
            return ""
        certain = "" if more else self._add(self._stream.flush())
        return certain + self._give(self.held)

    def ended(self, tokenizer: Tokenizer, ids: Sequence[int]) -> Answer:
        """This answer as it stays in the conversation, with the text that was held back as the
        possible beginning of a stop text, and the reason why it ended. ids: its tokens in the log;
        an interrupt may have come between the two."""
        made = copy(self)
        made.text += self.held
        made.reason = self.reason or ("stop" if self.stopped else "error")
        if self.generated - self.overshot != len(ids):
            again = Answer.resumed(tokenizer.stream(), self._stop, ids, "")
            made.text, made.ids = again.text + again.held, again.ids
            made.reason = self.reason or "error"
        return made

    def _add(self, piece: str) -> str:
        """Add text. Returns what is now certain to belong to the answer."""
        self._whole += piece
        begins = len(self.text)  # no stop text begins before what is held back
        found = [
            (at + len(stop), at)
            for stop in self._stop
            if (at := self._whole.find(stop, begins)) >= 0
        ]
        if found:
            self.stopped = True
            return self._give(self._whole[begins : min(found)[1]])
        return self._give(self.held[: len(self.held) - _beginning(self._stop, self.held)])

    def _give(self, text: str) -> str:
        self.text += text
        if not self._shown:
            return text
        same = 0
        while same < min(len(text), len(self._shown)) and text[same] == self._shown[same]:
            same += 1
        self._shown = self._shown[same:] if same == len(text) else ""
        return text[same:]


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes answers after the tokens of `log`, and adds their tokens to it.

    every: after so many tokens of an answer, and again, the rows under the budget are selected by a
    recall of the whole conversation; 0: never. max_context: positions that the model was trained
    for. cancelled(): whether the answer must end. began: when the turn began, as `perf_counter`
    seconds.
    """

    engine: Engine
    tokenizer: Tokenizer
    recall: Recall
    log: TokenLog
    settings: AnswerSettings
    seed: int
    every: int
    max_context: int
    cancelled: Callable[[], bool]
    began: float

    def write(self, answer: Answer, logits: Tensor | None) -> Generator[str, None, None]:
        """Write the answer until it ends, and yield its text. `answer.reason` then says why it
        ended.

        logits: of the last token that was read, float32 [V]; None if the pending token is fed
        first. Raises what a step raises; the log is correct also then.
        """
        log = self.log
        while not answer.reason:
            token = None if self.cancelled() else self._next(answer, logits)
            if token is None or token in self.tokenizer.stop_ids:
                answer.reason = "user" if token is None else "eos"
                break
            piece = answer.push(token)
            if not answer.overshot:  # else it is not fed, as a stop token
                log.pending = token  # last: if `push` raises, the token is not in the transcript
            if answer.stopped:
                answer.reason = "stop"
            elif answer.generated == self.settings.max_tokens:
                answer.reason = "length"
            elif log.seen == self.max_context:
                answer.reason = "context"
            if piece:
                yield piece
        continuable = answer.reason in ("length", "user") and log.seen < self.max_context
        if rest := answer.finish(more=continuable):
            yield rest

    def _next(self, answer: Answer, logits: Tensor | None) -> int | None:
        """The next token: of these logits, or after the pending token, which is then fed. None if
        that was stopped."""
        pending, every = self.log.pending, self.every
        if pending is None:
            assert logits is not None, "there is no token to begin with"
            token = self._pick(logits)
            answer.first_s = perf_counter() - self.began
            return token
        due = every > 0 and answer.generated > 0 and answer.generated % every == 0
        if due and self.recall.tier is not None:
            began = perf_counter()
            logits = self._recall(pending, self.settings.max_tokens - answer.generated)
            found = None if logits is None else self._pick(logits)
            answer.passes += found is not None
            if found is not None or not self.cancelled():
                answer.passes_s += perf_counter() - began
            if found is not None or self.cancelled():
                return found
            # The tier failed: the answer goes on without it.
        after = answer.generated + 1
        ahead = after < self.settings.max_tokens and not (every and after % every == 0)
        return self._step(answer, pending, ahead=ahead)

    def _step(self, answer: Answer, pending: int, *, ahead: bool) -> int:
        """Do one decode step. If the engine fails, the cache's position says whether the pending
        token was counted."""
        began, engine, settings = perf_counter(), self.engine, self.settings
        try:
            token = engine.next(
                pending,
                self.tokenizer.vocab,
                settings.sampling,
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
        are selected again. Returns the logits, float32 [V]; None if it was stopped or the tier
        failed, and then the cache has not changed."""
        engine, whole = self.engine, [*self.log.fed, pending]

        def between_chunks(done: int, total: int) -> None:
            if self.cancelled():
                raise Interrupted("stopped", "the answer ends here")

        self.recall.given(whole)
        try:
            return engine.recall(whole, between_chunks, room, engine.kv.last_turn)
        except Interrupted:
            return None
        except TierError as error:
            engine.notices.append(self.recall.failed(error))
            return None
        finally:
            if self.log.step(engine.kv.position) and (line := self.recall.keep(whole)):
                engine.notices.append(line)

    def _pick(self, logits: Tensor) -> int:
        vocab, sampling, position = self.tokenizer.vocab, self.settings.sampling, self.log.seen
        ops = self.engine.kv.ops
        return pick(logits, vocab, sampling, self.seed, position, ops, self._recent())

    def _recent(self) -> list[int]:
        """The last tokens of the conversation, if their logits are penalized."""
        if not self.settings.sampling.penalizes:
            return []
        return [*self.log.fed[-WINDOW:], *self.log.unfed]


def loops(ids: Sequence[int]) -> bool:
    """Whether at least half of the last tokens, and not only a few, belong to runs that the answer
    had before, word for word. The figures come from answers of a small model to questions about
    real texts: where it goes round in circles, nearly all of the last tokens do, else few."""
    seen: set[tuple[int, ...]] = set()
    again: set[int] = set()
    for end in range(_RUN, len(ids) + 1):
        run = tuple(ids[end - _RUN : end])
        if run in seen:
            again.update(range(end - _RUN, end))
        seen.add(run)
    last = range(max(len(ids) - _LAST, 0), len(ids))
    found = sum(i in again for i in last)
    return found >= max(_LEAST, len(last) / 2)


def looping(ids: Sequence[int], sampling: Sampling, own: Sampling) -> list[str]:
    """What to tell the user if the answer repeats itself, with what was not tried. own: how the
    model's makers draw its tokens."""
    if not loops(ids):
        return []
    ways = [] if sampling.repeat_penalty > 1.0 else ["`repeat_penalty=1.1`"]
    if sampling.temperature == 0.0:
        ways.append('`temperature="auto"`' if own.temperature > 0.0 else "`temperature=0.7`")
    return [f"the answer repeats itself{'; ' + ' or '.join(ways) + ' may help' if ways else ''}"]
