"""Separates a model's thoughts from its answer (`Thoughts`).

A reasoning model writes its thoughts first, between the two tags of its template. They begin with
the opening tag, which may already be in the prompt, and end with the first closing tag, or never.
The answer follows; a tag inside it, as in a block of code, is text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

Say = Callable[[str, int], None]
"""say(piece, tokens): text that was added to the thoughts, and their number of tokens so far."""


class Tags(Protocol):
    """What a chat needs to know about a template's tags; `minikv.models.thoughts.ThoughtTags` has
    it."""

    @property
    def begin(self) -> str: ...
    @property
    def end(self) -> str: ...
    @property
    def unseen(self) -> Mapping[int, str]: ...
    @property
    def ending(self) -> Sequence[int]: ...
    @property
    def forgets(self) -> bool: ...
    def opened(self, ids: Sequence[int]) -> bool: ...


def certain(text: str, ends: Sequence[str], begins: int) -> tuple[int, bool]:
    """How many characters of `text` are certain to come before the first of `ends`, whatever text
    follows, and whether `text` contains one of these. None of them begins before character
    `begins`."""
    found = [(at + len(one), at) for one in ends if (at := text.find(one, begins)) >= 0]
    if found:
        return min(found)[1], True
    longest = max(map(len, ends), default=1) - 1
    for size in range(min(longest, len(text) - begins), 0, -1):
        end = text[-size:]
        if any(len(one) > size and one.startswith(end) for one in ends):
            return len(text) - size, False
    return len(text), False


class Thoughts:
    """Takes the text of tokens and returns the part that belongs to the answer. The result depends
    only on the text, not on how it is divided.

    tags: the model's; None: all text belongs to the answer. opened: the prompt ends with the
    opening tag. most: tokens after which the closing tag is fed; 0: never. say: called with the
    text of the thoughts. inside: whether the thoughts have begun and not ended. unsure: text that
    may be the beginning of the opening tag.
    """

    def __init__(
        self,
        tags: Tags | None = None,
        opened: bool = False,
        most: int = 0,
        say: Say | None = None,
    ) -> None:
        self.tags, self.opened, self.most, self.say = tags, opened, most, say
        self.inside = opened
        self.unsure = ""
        self._undecided = tags is not None and not opened  # there may be none
        self._before_answer = False  # between the closing tag and the first letter of the answer
        self._text = self._held = ""
        self._counted = 0  # tokens so far

    @property
    def text(self) -> str:
        """The thoughts so far."""
        return (self._text + self._held).strip()

    @property
    def tokens(self) -> int:
        """How many tokens they have, with the tags."""
        return 0 if self._undecided else self._counted

    def again(self) -> Thoughts:
        """A new object with the same settings, before the first token."""
        return Thoughts(self.tags, self.opened, self.most)

    def push(self, token: int, piece: str) -> str:
        """Add a token and its text. Returns the text that belongs to the answer."""
        if self.tags is None:
            return piece
        if self.inside or self._undecided:
            self._counted += 1
        return self.add(self.tags.unseen.get(token, piece))

    def add(self, piece: str) -> str:
        """Add text. Returns what belongs to the answer."""
        if self.tags is None:
            return piece
        if self._undecided:
            self.unsure += piece
            begun, begin = self.unsure.lstrip(), self.tags.begin
            if begin.startswith(begun) and begun != begin:
                return ""
            piece, self.unsure, self._undecided = self.unsure, "", False
            self.inside = begun.startswith(begin)
            if not self.inside:
                self._counted = 0
                return piece
            piece = begun[len(begin) :]
        if self.inside:
            self._held += piece
            if not self._text:
                self._held = self._held.lstrip("\n")
            at, closed = certain(self._held, (self.tags.end,), 0)
            piece, more = self._held[:at], self._held[at:]
            self._text, self._held = self._text + piece, more
            if self.say is not None:
                self.say(piece, self._counted)
            if not closed:
                return ""
            self.inside, self._held, self._before_answer = False, "", True
            piece = more[len(self.tags.end) :]
        if self._before_answer:
            piece = piece.lstrip("\n")
            self._before_answer = not piece
        return piece

    def finish(self, piece: str) -> str:
        """Add the last piece of text. Returns the part that belongs to the answer, with any text
        held back."""
        piece = self.add(piece) + self.unsure
        self.unsure = ""
        if self.inside and self._held and self.say is not None:
            self.say(self._held, self._counted)
        return piece

    def forced(self, ids: Sequence[int]) -> int | None:
        """The token to write after the tokens `ids` of the answer instead of the drawn one, to end
        thoughts of at least `most` tokens. None: the drawn one."""
        if self.tags is None or not self.most or not self.tokens:
            return None
        ending, limit = list(self.tags.ending), self.most + (not self.inside)
        count, last = len(ending), list(ids[-len(ending) :])
        # How many of the closing tag's tokens were written: they are at the end of `ids`.
        done = next(n for n in range(count, -1, -1) if ending[:n] == last[len(last) - n :])
        # After the closing tag, only the rest of its tokens.
        over = done == count or not (self.inside or done > len(ids) - self._counted)
        return None if over or self._counted < limit else ending[done]
