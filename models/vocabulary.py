"""The common part of the two tokenizer file formats: the protocol, limits and error handling."""

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
"""Where a text is: at the start of everything, after a control token, or inside a text.

Sentencepiece-style vocabularies write a word with the space before it, and add a space where a text
starts. Which of the three places count as a start differs between files: `Vocabulary.prefix`.
"""

Prefix = Literal["every", "first", "never"]
"""Which texts get a space in front: "every": also those after a control token; "first": only the
very first one; "never": none."""

LARGEST_ID = 1 << 21
ADDED_TOKENS, ADDED_LENGTH, ADDED_TEXT = 100_000, 512, 1 << 21
"""Limits: the number of control and added tokens, the characters of one, and of all together.
Models with speech have 65,000 such tokens."""
_STDERR = threading.Lock()
_MARKER = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")


class Vocabulary(Protocol):
    """The content of a tokenizer file. `encode` never finds the strings of `control` in a text."""

    size: int
    """The number of ids: one more than the largest."""
    control: dict[str, int]
    """Control tokens by their string."""
    unknown: int | None
    """The id for characters that the vocabulary cannot spell; None if there is none. A text may
    have it."""
    pieces: list[bytes]
    """The bytes of the text of every id; b"" for control tokens."""
    prefix: Prefix
    drop_space: bool
    """Whether decoding drops one space at the very beginning."""

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
    """Raise CorruptModel if there are too many or too long added tokens to search for in reasonable
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


@contextmanager
def silent() -> Iterator[None]:
    """Within this context, standard error of the process goes to the null device, because the Rust
    library prints a backtrace there before Python can catch its panic. Use it only while a file is
    loaded. One thread at a time may be inside: a second one would save the redirected output as the
    original, and restore that."""
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
            raise CorruptModel(f"{name}: {what}: {detail}") from error
        raise
