"""The common part of the tokenizer file formats: the protocol, limits and error handling."""

from __future__ import annotations

import re
import string
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Literal, Protocol

from minikv.models.errors import CorruptModel, ModelError, quote

Place = Literal["start", "after", "inside"]
"""Where a text is: at the start of everything, after a control token, or inside a text.

Sentencepiece-style vocabularies store a word with the space before it, and add a space at the start
of a text. Files differ in which of the three places count as a start: see `Vocabulary.prefix`.
"""

Prefix = Literal["every", "first", "never"]
"""Which texts get a space in front: "every": also those after a control token; "first": only the
very first one; "never": none."""

LARGEST_ID = 1 << 21
ADDED_TOKENS, ADDED_LENGTH, ADDED_TEXT = 100_000, 512, 1 << 21
"""Limits: the number of control and added tokens, the characters of one, and of all together.
Speech models have 65,000 such tokens."""
ADDED_STATES = 1 << 20
"""The most distinct prefixes of all control and added tokens, in bytes of UTF-8. The tokenizers
library builds up to three tables with a state for each. A state takes about a microsecond and 75
bytes. Numbered tokens share their beginnings: 100,000 have 111,000."""
_FILTERED = 4  # how many first characters of a token the regular expression matches
_MARKER = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")


Edges = tuple[bool, bool, bool]
"""Whether a control token absorbs the white space before it, that after it, and whether it is found
only as a whole word."""


class Vocabulary(Protocol):
    """The content of a tokenizer file. `encode` never finds the strings of `control` in a text."""

    size: int
    """The number of ids: one more than the largest."""
    control: dict[str, int]
    """Control tokens by their string."""
    edges: dict[str, Edges]
    """The edges of control tokens, by their string, as far as the file states them."""
    unknown: int | None
    """The id for characters that the vocabulary cannot spell; None if there is none. A text may
    have it."""
    pieces: list[bytes]
    """The bytes of the text of every id; b"" for control tokens that the file calls special. A
    token that only looks like a control token (`<think>`) has text."""
    prefix: Prefix
    drop_space: bool
    """Whether decoding drops one space at the very beginning."""
    notes: tuple[str, ...]
    """Messages for the user about errors in the file."""

    def encode(self, text: str, place: Place) -> list[int]:
        """The ids of a well-formed text (without lone surrogates)."""
        ...

    def find(self, piece: str) -> int | None:
        """The id whose vocabulary entry is exactly `piece`; None if there is none."""
        ...


def is_marker(piece: str) -> bool:
    """Whether an added token looks like a control token: `<|im_start|>`, `[TOOL]`, `<s>`.

    Files do not always flag their turn markers as special. A token that looks like this is treated
    as a control token even without the flag: a text that spells it is encoded as ordinary pieces.
    """
    return _MARKER.fullmatch(piece) is not None


def check_added(texts: Collection[str], name: str) -> None:
    """Raise CorruptModel if added tokens are too many or too long to search for in reasonable
    time."""
    longest = max(map(len, texts), default=0)
    if len(texts) > ADDED_TOKENS:
        raise CorruptModel(f"{name} has {len(texts):,} added tokens; the most is {ADDED_TOKENS:,}")
    if longest > ADDED_LENGTH:
        raise CorruptModel(
            f"{name} has an added token of {longest:,} characters; the most is {ADDED_LENGTH}"
        )
    if sum(map(len, texts)) > ADDED_TEXT:
        raise CorruptModel(f"{name} has added tokens of more than {ADDED_TEXT:,} characters")
    if _states(texts) > ADDED_STATES:
        raise CorruptModel(
            f"{name} has added tokens with more than {ADDED_STATES:,} different beginnings"
        )


def _states(texts: Iterable[str]) -> int:
    """How many distinct prefixes the texts have in UTF-8: the states of their prefix tree."""
    count, before = 0, b""
    for text in sorted(text.encode("utf-8", "surrogatepass") for text in texts):
        differing = (n for n, (a, b) in enumerate(zip(before, text, strict=False)) if a != b)
        count += len(text) - next(differing, len(before))  # or `before` is a prefix of `text`
        before = text
    return count


def _each(characters: str) -> tuple[str, ...]:
    """Texts with the characters in one word, and alone."""
    return (characters, *characters)


PROBES = {
    "small letters": _each(string.ascii_lowercase),
    "capitals": _each(string.ascii_uppercase),
    "digits": _each(string.digits),
    "punctuation": _each(string.punctuation),
    "quotes and dashes": _each("\u2018\u2019\u201c\u201d\u2013\u2014\u2026\u2022"),
    "spaces": ("two words",),
    "spaces in a row": ("a  b",),
    "line ends": ("a\nb",),
    "tabs": ("a\tb",),
    "accents": _each("\u00e9\u00c9\u00fc\u00f1"),
    "Chinese": ("\u4e2d\u6587",),
    "emoji": ("\U0001f600",),
    "rare characters": ("\U0002a6d6",),
}
"""Texts that should survive encoding and decoding. They do with a vocabulary that spells bytes;
others lack the last."""


def lost(vocabulary: Vocabulary) -> list[str]:
    """Which of `PROBES` the vocabulary drops or changes."""

    def changed(text: str) -> bool:
        ids = vocabulary.encode(text, "start")
        return text_of(ids, vocabulary.pieces, vocabulary.drop_space) != text

    return [what for what, texts in PROBES.items() if any(map(changed, texts))]


def text_of(ids: Iterable[int], pieces: Sequence[bytes], drop_space: bool) -> str:
    """The text of ids. Ids outside of `pieces` have none."""
    data = b"".join(pieces[id] for id in ids if 0 <= id < len(pieces))
    text = data.decode("utf-8", "replace")
    return text.removeprefix(" ") if drop_space else text


class TokenSearch:
    """Finds control tokens in a text: from the left, the longest first.

    The result is that of a regular expression with all tokens as alternatives. But such an
    expression compares the text with every token that begins with the same character, in one call
    that holds the interpreter lock. Here, an expression of a few character classes finds the
    positions where a token can begin, and a bisection finds the longest token there. So the time
    does not depend on the number of tokens, and other threads and signals get their turn.

    texts: the tokens, sorted, without "". longest: the characters of the longest one.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = sorted({text for text in texts if text})
        self.longest = max(map(len, self.texts), default=0)
        shortest = min(map(len, self.texts), default=0)
        classes = [
            _character_class({text[n] for text in self.texts})
            for n in range(min(shortest, _FILTERED))
        ]
        self._candidate = re.compile("".join(classes) or r"(?!)")
        self._within: dict[str, str] = {}  # the longest other token that is a prefix of a token
        nested = [""]
        for text in self.texts:
            while not text.startswith(nested[-1]):
                nested.pop()
            self._within[text] = nested[-1]
            nested.append(text)

    @cached_property
    def backwards(self) -> list[str]:
        """The tokens read from their ends, sorted."""
        return sorted(text[::-1] for text in self.texts)

    def find(self, text: str) -> Iterator[tuple[int, str]]:
        """(position, token) of all tokens in the text. They do not overlap."""
        at = 0
        while (candidate := self._candidate.search(text, at)) is not None:
            at = candidate.start()
            token = self._longest(text[at : at + self.longest])
            if token:
                yield at, token
            at += len(token) or 1

    def _longest(self, text: str) -> str:
        """The longest token that is a prefix of the text; "" if there is none."""
        # The last token that is not after the text in sorted order begins with all of them.
        at = bisect_right(self.texts, text)
        token = self.texts[at - 1] if at else ""
        while not text.startswith(token):
            token = self._within[token]
        return token


def _character_class(characters: set[str]) -> str:
    """A regular expression for one of the characters. Those beyond U+FFFF become one whole range,
    because `re` would compare a character with each of them."""
    far = {character for character in characters if character > "\uffff"}
    near = "".join(map(re.escape, sorted(characters - far)))
    return f"[{near}{min(far)}-{max(far)}]" if far else f"[{near}]"


@contextmanager
def library_errors(name: str, what: str) -> Iterator[None]:
    """Within this context, whatever a parsing library raises becomes a CorruptModel that names the
    file. what: what failed, for the message.

    The libraries raise bare Exception and RuntimeError. A panic of the Rust library is not even an
    Exception; it is recognised by its name, because the library does not export the class.
    """
    try:
        yield
    except ModelError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            detail = quote(" ".join(str(error).split()), 200)[1:-1]  # it may quote the file
            error.args = (detail,)  # it stays in memory as long as the error that it causes
            raise CorruptModel(
                f"{name}: {what}: {detail}",
                f"download {name} again, as the model was published with it; `hf download NAME` "
                "fetches a whole model",
            ) from error
        raise
