"""Turns messages into the token ids of a prompt. Ten megabytes of text take seconds, so this can be
stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minikv.chat import reuse
from minikv.chat.protocols import Template
from minikv.chat.stoppable import stoppable
from minikv.chat.transcript import Message
from minikv.errors import MemoryShortError

_LONG = 256 << 10
"""Bytes of new text above which tokenizing takes noticeable time and memory."""
_TOKENIZING = 100
"""Bytes of memory that tokenizing takes per byte of text (measured: 45 to 110)."""

Compose = Callable[[Sequence[Message]], list[int]]


@dataclass(frozen=True, slots=True)
class Composer:
    """Makes prompts with a chat template. free(): free bytes of host memory, None if not known.
    stopped(): whether tokenizing must stop.

    Its methods raise Interrupted if it is stopped, and MemoryShortError where the tokenizer's
    library would run out of memory and end the process.
    """

    template: Template
    free: Callable[[], int | None]
    stopped: Callable[[], bool]

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the whole conversation, up to where the next answer begins."""
        return self._ids(self.template.opening, messages, messages)

    def following(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of what comes after the last answer, up to where the next one begins."""
        return self._ids(self.template.following, messages, messages[-1:])

    def _ids(
        self, compose: Compose, messages: Sequence[Message], new: Sequence[Message]
    ) -> list[int]:
        size = sum(len(message.content.encode("utf-8", "surrogatepass")) for message in new)
        if size < _LONG:
            return compose(messages)
        free = self.free()
        if free is not None and free < size * _TOKENIZING:
            raise MemoryShortError(
                f"tokenizing {size >> 10:,} KiB of text takes about {size * _TOKENIZING >> 20:,} "
                f"MiB of memory, and {free >> 20:,} MiB are free",
                "ask about a shorter document, or free memory",
            )
        return stoppable(lambda: compose(messages), self.stopped)


def start(template: Template, system: str) -> list[int]:
    """Token ids before the text of the first user message, with the BOS token if the model has one.
    All conversations with this system prompt begin with them."""
    system_messages = [Message("system", system)] if system else []
    one, two = (template.opening([*system_messages, Message("user", text)]) for text in ("a", "7?"))
    return one[: reuse.shared(one, two)]


def with_content(compose: Compose, messages: Sequence[Message]) -> Callable[[int, str], list[int]]:
    """A function (index, content) that replaces the content of that message, and returns `compose`
    of the messages."""

    def again(at: int, content: str) -> list[int]:
        changed = list(messages)
        changed[at] = Message(changed[at].role, content)
        return compose(changed)

    return again
