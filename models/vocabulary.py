"""What the two tokenizer file formats have in common."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

from minikv.models.errors import CorruptModel, ModelError, quote

Place = Literal["start", "after", "inside"]
"""Where a text stands: at the start of everything, after a control token, or inside a text.

Sentencepiece-style vocabularies write a word with the space before it, and add one where a text
starts. Which of the three places count as a start differs between files: `Vocabulary.prefix`.
"""

Prefix = Literal["every", "first", "never"]
"""Texts that get a space in front: after every control token too, the very first one, none."""

LARGEST_ID = 1 << 21
ADDED_TOKENS, ADDED_LENGTH, ADDED_TEXT = 100_000, 512, 1 << 21
"""Control and added tokens, characters of one, and of all. Models that speak have 65,000."""
_STDERR = threading.Lock()
_MARKER = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")


class Vocabulary(Protocol):
    """One tokenizer file. `encode` never matches the strings of `control` in a text."""

    size: int
    """Entries of the file: one more than the largest id."""
    control: dict[str, int]
    """Control tokens by their string."""
    unknown: int | None
    """The id for characters that the vocabulary cannot spell; a text may yield it."""
    pieces: list[bytes]
    """The text bytes of every id, b"" for control tokens."""
    prefix: Prefix
    drop_space: bool
    """Decoding drops one space at the very beginning."""

    def encode(self, text: str, place: Place) -> list[int]:
        """Ids of well-formed text (no lone surrogates)."""
        ...

    def find(self, piece: str) -> int | None:
        """The id whose vocabulary entry is exactly `piece`."""
        ...


def is_marker(piece: str) -> bool:
    """Whether an added token is spelled like a control token: `<|im_start|>`, `[TOOL]`, `<s>`.

    Files do not always flag their turn markers as special. An unflagged token of this shape is
    treated as a control token: text that spells it is encoded as ordinary pieces.
    """
    return _MARKER.fullmatch(piece) is not None


def check_added(texts: Collection[str], name: str) -> None:
    """Raises CorruptModel for more or longer added tokens than can be told apart in good time."""
    longest = max(map(len, texts), default=0)
    if len(texts) > ADDED_TOKENS:
        raise CorruptModel(f"{name} has {len(texts):,} added tokens; the most is {ADDED_TOKENS:,}")
    if longest > ADDED_LENGTH:
        raise CorruptModel(
            f"{name} has an added token of {longest:,} characters; the most is {ADDED_LENGTH}"
        )
    if sum(map(len, texts)) > ADDED_TEXT:
        raise CorruptModel(f"{name} has added tokens of more than {ADDED_TEXT:,} characters")


@contextmanager
def silent() -> Iterator[None]:
    """Nothing is written to the process's standard error: the Rust library prints a backtrace there
    before Python can catch its panic. For the loading of a file, while nothing else is shown. One
    thread at a time: the second would find the first one's silence and leave it behind."""
    with _STDERR, contextlib.ExitStack() as undo:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        with contextlib.suppress(OSError):  # there may be no standard error
            kept = os.dup(2)
            undo.callback(os.close, kept)
            undo.callback(os.dup2, kept, 2)
            null = os.open(os.devnull, os.O_WRONLY)
            undo.callback(os.close, null)
            os.dup2(null, 2)
        yield


@contextmanager
def library_errors(name: str, what: str) -> Iterator[None]:
    """Turns whatever a parsing library raises into CorruptModel naming the file.

    The libraries raise bare Exception and RuntimeError; a panic of the Rust one is not even an
    Exception, and is told by its name because the library does not export the class.
    """
    try:
        yield
    except ModelError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            detail = quote(" ".join(str(error).split()), 200)[1:-1]  # with texts of the file
            raise CorruptModel(f"{name}: {what}: {detail}") from error
        raise
