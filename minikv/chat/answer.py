"""Writes an answer: `Writer` produces tokens and `Answer` their text, until a stop text, a stop
token or a limit ends it. `loops` says whether an answer repeats itself. `rewritten` writes it again
without eviction, to compare."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from copy import copy
from dataclasses import asdict, dataclass, fields
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from minikv.cache.tier import TierSteps
from minikv.chat.reading import Tools
from minikv.chat.report import AgainstFull, TurnReport
from minikv.chat.thoughts import Say, Thoughts, certain
from minikv.chat.transcript import Template, TextStream, Tokenizer, TokenLog, shared
from minikv.engine.sampling import WINDOW, Sampling, pick
from minikv.errors import UsageError

_RUN = 32  # consecutive tokens that occurred before; the lines of a table share fewer
_LAST = 128  # tokens at the end that are examined
_LEAST = 48  # of these tokens, in such runs


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How an answer is written: how tokens are drawn, how many at most, the texts before which it
    ends, the most tokens of its thoughts (0: no limit), and who receives the thoughts."""

    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...]
    max_thoughts: int = 0
    thinking: Say | None = None

    def record(self) -> dict[str, object]:
        """The settings for the turn record."""
        return {
            **asdict(self.sampling),
            "max_tokens": self.max_tokens,
            "stop": list(self.stop),
            "max_thoughts": self.max_thoughts,
        }


class Answer:
    """Takes tokens and returns pieces of text, until a stop text is complete, even across several
    tokens. Text that may be the beginning of a stop text is held back until that is decided. The
    result depends only on the text, not on how it is divided. Stop texts do not apply to
    `thoughts`, which are not returned.

    ids: its tokens so far, with those of its thoughts. stopped: whether a stop text ended it.
    steps, decode_s: decode steps, and their seconds; thought_s: those of its thoughts. first_s:
    seconds until the first token; None before it. reason: why the answer ended; "" before it ends.
    """

    def __init__(
        self, stream: TextStream, stop: Sequence[str] = (), thoughts: Thoughts | None = None
    ) -> None:
        self.thoughts = thoughts or Thoughts()
        self.ids: list[int] = []
        self.stopped = False
        self.steps = 0
        self.decode_s = self.thought_s = 0.0
        self.first_s: float | None = None
        self.reason = ""
        self._stream, self._stop = stream, stop
        self._whole = ""  # the text of all tokens
        self._end = 0  # how many of its characters were returned
        self._before = 0  # how many of its characters come before the last token
        self._shown = ""  # text of an earlier part, which is not returned again

    @classmethod
    def resumed(
        cls,
        stream: TextStream,
        stop: Sequence[str],
        ids: Iterable[int],
        shown: str,
        thoughts: Thoughts | None = None,
    ) -> Answer:
        """An answer that continues after the tokens `ids`, of which the text `shown` was returned.
        It contains no stop text. thoughts: those of the earlier part; they are parsed again from
        `ids`."""
        made = cls(stream, stop, thoughts and thoughts.again())
        made.ids = list(ids)
        made._whole = "".join(map(made._read, made.ids))
        made.thoughts.say = None if thoughts is None else thoughts.say  # only of the new tokens
        made._before = len(made._whole)
        made._end, _ = certain(made._whole, stop, 0)
        # The rest of `shown` is text that `finish` returned at the end of the earlier part: text
        # held back, and U+FFFD for an incomplete character.
        made._shown = shown[made._end :]
        return made

    @property
    def text(self) -> str:
        """The text returned so far."""
        return self._whole[: self._end]

    @property
    def generated(self) -> int:
        """How many tokens it has."""
        return len(self.ids)

    @property
    def overshot(self) -> bool:
        """Whether none of the last token's text belongs to the answer."""
        return self.stopped and self._end <= self._before

    def push(self, token: int) -> str:
        """Add a token. Returns the text that is now certain to belong to the answer."""
        thinking, unsure = self.thoughts.inside, self.thoughts.unsure
        piece = self._read(token)
        self.ids.append(token)
        self._before = len(self._whole + unsure)
        if thinking:
            self.thought_s = self.decode_s
        return self._add(piece)

    def _read(self, token: int) -> str:
        """The text that a token adds to the answer."""
        return self.thoughts.push(token, self._stream.push(token))

    def finish(self, *, more: bool = False) -> str:
        """End the answer: return the text that was held back; "" after a stop text. more: the
        answer may be continued, so an incomplete character is still held back."""
        if self.stopped:
            return ""
        text = self._add(self.thoughts.finish("" if more else self._stream.flush()))
        return text if self.stopped else text + self._give(len(self._whole))

    def ended(self, tokenizer: Tokenizer, ids: Sequence[int]) -> Answer:
        """This answer as the conversation keeps it: with the text held back as the possible
        beginning of a stop text, and the reason why it ended. ids: its tokens in the log, which
        after an interrupt may differ from those here."""
        made = copy(self)
        made.reason = self.reason or ("stop" if self.stopped else "error")
        if self.generated - self.overshot != len(ids):
            again = Answer.resumed(tokenizer.stream(), self._stop, ids, "", self.thoughts)
            made._whole, made.ids, made.thoughts = again._whole, again.ids, again.thoughts
            made.reason = self.reason or "error"
        if not self.stopped or made.ids is not self.ids:
            made._whole += made.thoughts.unsure
            made._end = len(made._whole)
        return made

    def _add(self, piece: str) -> str:
        """Add text. Returns what is now certain to belong to the answer."""
        self._whole += piece
        end, self.stopped = certain(self._whole, self._stop, self._end)
        return self._give(end)

    def _give(self, end: int) -> str:
        """Return the text up to `end` that was not returned before."""
        text, self._end = self._whole[self._end : end], end
        same = shared(text, self._shown)
        self._shown = self._shown[same:] if same == len(text) else ""
        return text[same:]


Step = Callable[[int, list[int], bool], int]
"""step(token, recent, ahead): feed a token and return the next; see `Engine.next`."""


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes answers after the tokens of `log`, and adds their tokens to it.

    step: does a decode step; position(): how many tokens the cache has counted. max_context:
    positions that the model was trained for. began: when the turn began, in seconds of
    `perf_counter`.
    """

    tools: Tools
    step: Step
    position: Callable[[], int]
    log: TokenLog
    settings: AnswerSettings
    seed: int
    max_context: int
    began: float

    def write(self, answer: Answer, logits: Tensor | None) -> Generator[str, None, None]:
        """Write the answer until it ends, and yield its text. Sets `answer.reason`, which says why
        it ended.

        logits: of the last token that was read, float32 [V]; None if the pending token is fed
        first. If a step raises an error, the log is still correct.
        """
        log, cancelled = self.log, self.tools.cancelling.cancelled
        while not answer.reason:
            token = None if cancelled() else self._next(answer, logits)
            if token is not None and (forced := answer.thoughts.forced(answer.ids)) is not None:
                token = forced
            if token is None or token in self.tools.tokenizer.stop_ids:
                answer.reason = "user" if token is None else "eos"
                break
            piece = answer.push(token)
            if not answer.overshot:  # otherwise it is not fed, like a stop token
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
        """The next token: drawn from these logits, or after feeding the pending token. None if that
        was stopped."""
        pending = self.log.pending
        if pending is None:
            assert logits is not None, "there is no token to begin with"
            token = self._pick(logits)
            answer.first_s = perf_counter() - self.began
            return token
        began = perf_counter()
        ahead = answer.generated + 1 < self.settings.max_tokens
        try:
            token = self.step(pending, self._recent(), ahead)
        finally:
            # Even after an error, the position says whether the pending token was counted.
            self.log.step(self.position())
        answer.steps += 1
        answer.decode_s += perf_counter() - began
        return token

    def _pick(self, logits: Tensor) -> int:
        vocab, ops = self.tools.tokenizer.vocab, self.tools.engine.kv.ops
        how = self.settings.sampling, self.seed, self.log.seen
        return pick(logits, vocab, *how, ops, self._recent())

    def _recent(self) -> list[int]:
        """The last tokens of the conversation, if their logits are to be penalized."""
        if not self.settings.sampling.penalizes:
            return []
        return [*self.log.fed[-WINDOW:], *self.log.unfed]


def thoughts_after(template: Template, read: Sequence[int], settings: AnswerSettings) -> Thoughts:
    """The empty thoughts of an answer after a prompt that ends with the tokens `read`."""
    tags = template.tags
    opened = tags is not None and tags.opened(read)
    return Thoughts(tags, opened, settings.max_thoughts, settings.thinking)


def unanswered(answer: Answer) -> list[str]:
    """A line for the user if the thoughts did not end, unless the user stopped them."""
    if not answer.thoughts.inside or answer.reason in ("user", "error"):
        return []
    way = "`max_thoughts=N` ends its thoughts after N tokens"
    return [f"the model was still thinking, so there is no answer; {way}"]


def loops(ids: Sequence[int]) -> bool:
    """Whether at least half of the last tokens (and at least `_LEAST`) belong to runs that occurred
    earlier in the answer, word for word. The limits come from answers of a small model to questions
    about real texts: if it repeats itself, nearly all of the last tokens do, otherwise few."""
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
    """A line for the user if the answer repeats itself, with settings that may help. own: the
    sampling that the model's makers recommend."""
    if not loops(ids):
        return []
    ways = [] if sampling.repeat_penalty > 1.0 else ["`repeat_penalty=1.1`"]
    if sampling.temperature == 0.0:
        ways.append('`temperature="auto"`' if own.temperature > 0.0 else "`temperature=0.7`")
    return [f"the answer repeats itself{'; ' + ' or '.join(ways) + ' may help' if ways else ''}"]


# -- the same answer without eviction ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verification:
    """The comparison of an answer with the one written without eviction.

    tokens: ids of the second answer. text: its text. same: how many tokens are equal from the
    beginning. differs: whether the answers differ after these. was and now: the text of the first
    token that differs, in the first and in the second answer; None if that answer ends there.
    complete: False if writing was stopped. seconds: wall time.
    """

    tokens: tuple[int, ...]
    text: str
    same: int
    differs: bool
    was: str | None
    now: str | None
    complete: bool
    seconds: float

    @property
    def against_full(self) -> AgainstFull | None:
        """The result for the turn record; None if there is none."""
        if not (self.differs or self.complete):
            return None
        tokens = self.same if self.differs else None
        return AgainstFull(not self.differs, checked=True, tokens=tokens)


def rewritten(
    tools: Tools,
    ids: Sequence[int],
    report: TurnReport | None,
    progress: Callable[[int, int], None] | None,
) -> Generator[str, None, Verification]:
    """Write the answer of `report`, the last one of the conversation `ids`, again; yield its text.

    The chat and its cache do not change. Raises UsageError if there is no answer, or no tier that
    has its question, and the errors of a step.
    """
    began, engine, tokenizer = perf_counter(), tools.engine, tools.tokenizer
    if report is None or not report.tokens.generated:
        raise UsageError("there is no answer to verify", "ask something first")
    read = report.tokens.prompt_reused + report.tokens.prompt_new
    if len(ids) < read:
        why = "the tokens of this chat are not known until its next question"
        raise UsageError(f"this answer cannot be verified: {why}", "ask something first")
    tier = tools.recall.tier
    if tier is None or tools.recall.has(ids[:read]) < read:
        why = "the tier no longer has its question"
        if not tools.recall.tokens:
            why = "no tier has the text" + (f" ({tools.recall.why})" if tools.recall.why else "")
        hint = '`reuse="auto"` with a tier makes that possible for the next answer'
        raise UsageError(f"this answer cannot be verified: {why}", hint)
    how: Any = report.sampling
    # The record of a chat saved by an earlier version has no penalty and no limit.
    sampling = Sampling(**{one.name: how[one.name] for one in fields(Sampling) if one.name in how})
    # An answer that did not end by itself is compared up to its length.
    itself = report.stop_reason in ("eos", "stop")
    most = max(int(how["max_tokens"]), 1) if itself else report.tokens.generated
    steps, ops = TierSteps(tier, read - 1, engine.kv.ops), engine.kv.ops
    settings = AnswerSettings(sampling, most, tuple(how["stop"]), how.get("max_thoughts", 0))
    thoughts = thoughts_after(tools.template, ids[:read], settings)
    answer = Answer(tokenizer.stream(), settings.stop, thoughts)

    def step(token: int, recent: list[int], ahead: bool) -> int:
        fed = torch.tensor([token], dtype=torch.int64, device=engine.kv.device)
        logits, vocab = engine.network.forward(fed, steps), tokenizer.vocab
        found = pick(logits, vocab, sampling, report.seed, steps.position, ops, recent)
        if progress is not None:
            progress(answer.generated + 1, report.tokens.generated)
        return found

    log = TokenLog(ids[:read], read - 1)
    context = engine.kv.shape.max_context
    writer = Writer(tools, step, lambda: steps.position, log, settings, report.seed, context, began)
    try:
        yield from writer.write(answer, None)
    finally:
        steps.close()
    first, second = ids[read:], log.ids[read:]
    same, complete = shared(first, second), answer.reason != "user"
    differs = same < min(len(first), len(second)) or (complete and len(first) != len(second))
    was, now = (
        tokenizer.decode(run[same : same + 1]) if differs and same < len(run) else None
        for run in (first, second)
    )
    took = perf_counter() - began
    return Verification(tuple(second), answer.text, same, differs, was, now, complete, took)
