"""Stop texts: an answer ends before the first of them, even if it is spread over several tokens.

Text that may be the beginning of a stop text is held back until that is decided. The result depends
only on the text, not on how it is divided into tokens: the stop text that is complete first ends
the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minikv import checks
from minikv.errors import UsageError


def stop_texts(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """The given stop texts, each once; None: none. A single text need not be in a sequence. Raises
    UsageError for one that is empty or not a str."""
    if isinstance(given, str | None):
        given = () if given is None else (given,)
    if isinstance(given, bytes | bytearray) or not isinstance(given, Iterable):
        raise UsageError(f"`stop` must be a text (str) or several, got {checks.quoted(given)}")
    texts = tuple(given)
    for text in texts:
        checks.text("each text of `stop`", text)
        if not text:
            raise UsageError("a stop text is empty", "every answer would end before it begins")
    return tuple(dict.fromkeys(texts))


class StopTexts:
    """Takes pieces of text and returns those that belong to the answer, until one of `texts` is
    complete.

    found: whether a stop text was complete. held: the end of the text so far that may be the
    beginning of a stop text.
    """

    def __init__(self, texts: Sequence[str], held: str = "") -> None:
        self.texts = texts
        self.held = held
        self.found = False

    @classmethod
    def after(cls, texts: Sequence[str], text: str) -> StopTexts:
        """The state after `text`, in which no stop text was found."""
        return cls(texts, _beginning(texts, text))

    def push(self, piece: str) -> str:
        """Add a piece. Returns the text that is now certain to belong to the answer."""
        assert not self.found, "the answer has ended"
        text = self.held + piece
        ends = [(at + len(stop), at) for stop in self.texts if (at := text.find(stop)) >= 0]
        if ends:
            self.found, self.held = True, ""
            return text[: min(ends)[1]]
        self.held = _beginning(self.texts, text)
        return text[: len(text) - len(self.held)]

    def flush(self) -> str:
        """No more text comes: return what was held back, because it is not a stop text."""
        rest, self.held = self.held, ""
        return rest


def _beginning(texts: Sequence[str], text: str) -> str:
    """The longest end of `text` with which a stop text begins; "" if there is none."""
    longest = max((len(stop) for stop in texts), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        end = text[-size:]
        if any(len(stop) > size and stop.startswith(end) for stop in texts):
            return end
    return ""
