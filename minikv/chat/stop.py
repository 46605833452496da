"""Texts before which an answer ends, found whichever tokens they are spread over.

What may be the beginning of a stop text is held back until it is known whether it is one. The
result depends on the text alone, however it is cut into tokens: the stop text that is complete
first ends the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from minikv.errors import UsageError


def stop_texts(given: str | Sequence[str]) -> tuple[str, ...]:
    """The stop texts that were given, each once. One text may stand alone. Raises UsageError."""
    texts = (given,) if isinstance(given, str) else tuple(given)
    for text in texts:
        if not isinstance(text, str):
            raise UsageError(f"a stop text is a text, got {text!r:.40}")
        if not text:
            raise UsageError("a stop text is empty", "every answer would end before it begins")
    return tuple(dict.fromkeys(texts))


class StopTexts:
    """Text in, text out, until one of `texts` is complete; `found` says whether it was.

    held: the end of the text so far that may be the beginning of a stop text.
    """

    def __init__(self, texts: Sequence[str], held: str = "") -> None:
        self._texts = texts
        self.held = held
        self.found = False

    @classmethod
    def after(cls, texts: Sequence[str], text: str) -> StopTexts:
        """As if `text` had come already, and nothing had been found in it."""
        return cls(texts, _beginning(texts, text))

    def push(self, piece: str) -> str:
        """The text that is certain to belong to the answer by now."""
        assert not self.found, "the answer has ended"
        text = self.held + piece
        ends = [(at + len(stop), at) for stop in self._texts if (at := text.find(stop)) >= 0]
        if ends:
            self.found, self.held = True, ""
            return text[: min(ends)[1]]
        self.held = _beginning(self._texts, text)
        return text[: len(text) - len(self.held)]

    def flush(self) -> str:
        """What was held back: no stop text came of it."""
        rest, self.held = self.held, ""
        return rest


def _beginning(texts: Sequence[str], text: str) -> str:
    """The longest end of `text` that a stop text begins with."""
    longest = max((len(stop) for stop in texts), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        end = text[-size:]
        if any(len(stop) > size and stop.startswith(end) for stop in texts):
            return end
    return ""
