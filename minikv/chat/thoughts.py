"""Divides what a model writes into its thoughts and its answer (`Thoughts`).

A model that reasons writes its thoughts first, between the two tags of its template. They begin
with the first tag, or the prompt has opened it, and end with the first closing tag, or never. What
comes after that is the answer; a tag in it, as in a block of code, is text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

Say = Callable[[str, int], None]
"""say(piece, tokens): text that was added to the thoughts, which have so many tokens by then."""


class Tags(Protocol):
    """What a chat needs of the tags of a template; `minikv.models.thoughts.ThoughtTags` has it."""

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
    """How many characters of `text` come before the first of `ends`, whatever comes next, and
    whether one of these is complete. None of them begins before character `begins`."""
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
    """Takes the text of tokens and returns what belongs to the answer. The result depends only on
    the text, not on how it is divided.

    tags: of the model; None: all text belongs to the answer. opened: the prompt ends with the
    opening tag. most: tokens after which the closing tag is fed; 0: never. say: called with the
    text of the thoughts. inside: whether the closing tag is still to come. unsure: text that may be
    the beginning of the opening tag.
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
        self._undecided = tags is not None and not opened  # whether there are any
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
        """The same, before the first token."""
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
        """No more text comes after `piece`. Returns what belongs to the answer, with what was held
        back."""
        piece = self.add(piece) + self.unsure
        self.unsure = ""
        if self.inside and self._held and self.say is not None:
            self.say(self._held, self._counted)
        return piece

    def forced(self, ids: Sequence[int]) -> int | None:
        """The token to write after the tokens `ids` of the answer instead of the one that was
        drawn: those that end thoughts of at least `most` tokens. None: the drawn one."""
        if self.tags is None or not self.most or not self.tokens:
            return None
        ending, limit = list(self.tags.ending), self.most + (not self.inside)
        count, last = len(ending), list(ids[-len(ending) :])
        # How many of them were written: they are at the end of `ids`.
        done = next(n for n in range(count, -1, -1) if ending[:n] == last[len(last) - n :])
        # After the closing tag, only the rest of them.
        over = done == count or not (self.inside or done > len(ids) - self._counted)
        return None if over or self._counted < limit else ending[done]
