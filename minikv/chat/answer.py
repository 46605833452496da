"""An answer while it is written: turns its tokens into text and looks for stop texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import asdict, dataclass

from minikv.chat.protocols import TextStream, Tokenizer
from minikv.chat.stop import StopTexts
from minikv.engine.sampling import Sampling


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How an answer is written: how tokens are drawn, how many at most, and the texts before which
    it ends."""

    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...]

    def record(self) -> dict[str, object]:
        """The settings for the turn record."""
        return {
            **asdict(self.sampling),
            "max_tokens": self.max_tokens,
            "stop": list(self.stop),
        }


@dataclass(frozen=True, slots=True)
class Anew:
    """How often the rows under the budget are chosen anew during an answer, by a recall of the
    whole conversation: after every `every` tokens; 0: never. rows: the budget in rows per head, if
    it is not the user's."""

    every: int
    rows: int | None = None

    def due(self, generated: int) -> bool:
        """Whether to choose anew after `generated` tokens of the answer."""
        return self.every > 0 and generated > 0 and generated % self.every == 0


class Answer:
    """Takes tokens and returns pieces of text.

    text: the text returned so far. ids: its tokens so far; generated: how many. steps, decode_s:
    decode steps, and their seconds. passes, passes_s: how often the conversation was recalled
    instead of a step, and the seconds of that. first_s: seconds until the first token; None before
    it. reason: why the answer ended; "" before it ends.
    """

    def __init__(self, stream: TextStream, stop: Sequence[str] = ()) -> None:
        self.text = ""
        self.ids: list[int] = []
        self.steps = self.passes = 0
        self.decode_s = self.passes_s = 0.0
        self.first_s: float | None = None
        self.reason = ""
        self._stream = stream
        self._stop = StopTexts(stop)
        self._length = 0  # characters of the text of all tokens
        self._before = 0  # characters of the text before the last token
        self._shown = ""  # text of an earlier part, which is not returned again

    @classmethod
    def resumed(
        cls, stream: TextStream, stop: Sequence[str], ids: Iterable[int], shown: str
    ) -> Answer:
        """An answer that goes on after the tokens `ids`, of which the text `shown` was returned."""
        made = cls(stream, stop)
        text = ""
        for id in ids:
            text += stream.push(id)
            made.ids.append(id)
        made._length = made._before = len(text)
        made._stop = StopTexts.after(stop, text)
        made.text = text[: len(text) - len(made._stop.held)]
        # The rest of `shown` is text that `flush` returned at the end of the earlier part: what was
        # held back, and U+FFFD for an incomplete character.
        made._shown = shown[len(made.text) :]
        return made

    @property
    def generated(self) -> int:
        """How many tokens it has."""
        return len(self.ids)

    @property
    def rate(self) -> float | None:
        """Tokens per second of the decode steps; None if there was no step."""
        return self.steps / self.decode_s if self.steps and self.decode_s else None

    @property
    def stopped(self) -> bool:
        """Whether a stop text ended it."""
        return self._stop.found

    @property
    def overshot(self) -> bool:
        """Whether no text of the last token belongs to the answer."""
        return self.stopped and len(self.text) <= self._before

    def push(self, token: int) -> str:
        """Add a token. Returns the text that is now certain to belong to the answer."""
        piece = self._stream.push(token)
        self.ids.append(token)
        self._before = self._length
        self._length += len(piece)
        return self._give(self._stop.push(piece) if piece else "")

    def finish(self, *, more: bool = False) -> str:
        """No more tokens come now: return the text that was held back. After a stop text that is
        "". more: the answer may be continued, so an incomplete character is still held back."""
        if self.stopped:
            return ""
        rest = "" if more else self._stream.flush()
        text = self._stop.push(rest) if rest else ""
        return self._give(text + ("" if self.stopped else self._stop.flush()))

    def ended(self, tokenizer: Tokenizer, ids: Sequence[int]) -> Answer:
        """This answer as it stays in the conversation, with the text that was held back as the
        possible beginning of a stop text, and the reason why it ended. ids: its tokens in the log;
        an interrupt may have come between the two."""
        made = copy(self)
        made.text += self._stop.held
        made.reason = self.reason or ("stop" if self.stopped else "error")
        if self.generated - self.overshot != len(ids):
            again = Answer.resumed(tokenizer.stream(), self._stop.texts, ids, "")
            made.text, made.ids = again.text + again._stop.held, again.ids
            made.reason = self.reason or "error"
        return made

    def _give(self, text: str) -> str:
        self.text += text
        if not self._shown:
            return text
        same = 0
        while same < min(len(text), len(self._shown)) and text[same] == self._shown[same]:
            same += 1
        self._shown = self._shown[same:] if same == len(text) else ""
        return text[same:]
