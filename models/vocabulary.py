"""What the two tokenizer file formats have in common, and the reading of untrusted files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from minikv.models.errors import CorruptModel, ModelError, ModelUnavailable

Place = Literal["start", "after", "inside"]
"""Where a text stands: at the start of everything, after a control token, or inside a text.

Sentencepiece-style vocabularies write a word with the space before it, and add one where a text
starts. Which of the three places count as a start differs between files: `Vocabulary.prefix`.
"""

Prefix = Literal["every", "first", "never"]
"""Texts that get a space in front: after every control token too, the very first one, none."""

LARGEST_ID = 1 << 21
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


def read_bytes(path: Path, limit: int) -> bytes:
    """A regular file of at most `limit` bytes. Raises ModelUnavailable or CorruptModel."""
    if not path.is_file():
        raise ModelUnavailable(f"{path.name} is missing or not a regular file in {path.parent}")
    try:
        if path.stat().st_size > limit:
            raise CorruptModel(f"{path.name} is larger than {limit >> 10} KiB")
        return path.read_bytes()
    except OSError as error:
        raise ModelUnavailable(f"{path.name} cannot be read: {error.strerror}") from error


def read_object(path: Path, limit: int = 128 << 20) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelUnavailable or CorruptModel."""
    data = read_bytes(path, limit)
    try:
        found = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise CorruptModel(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise CorruptModel(f"{path.name} does not hold a JSON object")
    return found


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
            detail = " ".join(str(error).split())[:200]
            raise CorruptModel(f"{name}: {what}: {detail}") from error
        raise
