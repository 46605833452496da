"""Finds which heads still hold which tokens, for /kept and /export."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product, zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from minikv.chat.session import ChatSession
    from minikv.chat.transcript import Document, Tokenizer


@dataclass(frozen=True, slots=True)
class Spans:
    """The text of a run of tokens, piece by piece.

    Piece k is text[start[k] : end[k]] and belongs to the token at position token[k]. Tokens without
    text (control tokens) have no piece; tokens that together spell one character all have the same
    piece. Start and end ascend.
    """

    text: str
    token: tuple[int, ...]
    start: tuple[int, ...]
    end: tuple[int, ...]

    def overlap(self, begin: int, end: int) -> range:
        """The pieces that overlap text[begin:end]."""
        return range(bisect_right(self.end, begin), bisect_left(self.start, end))

    def within(self, first: int, last: int) -> range:
        """The pieces of the tokens at positions first to last, the last one excluded."""
        return range(bisect_left(self.token, first), bisect_left(self.token, last))


@dataclass(frozen=True, slots=True)
class Part:
    """A document in the cache: the tokens at positions first to last, the last one excluded."""

    name: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Kept:
    """Which of the T tokens fed so far each KV head holds, and the text of the tokens.

    held: bool [L, H, T] on the host. parts: the documents whose text was found among the tokens, in
    order; there may be none.
    """

    held: Tensor
    spans: Spans
    parts: tuple[Part, ...]

    @property
    def slots(self) -> int:
        """L x H: how many heads can hold a token."""
        return int(self.held.shape[0] * self.held.shape[1])

    def share(self) -> Tensor:
        """float32 [T]: the share of the heads that hold each token."""
        import torch

        return self.held.flatten(0, 1).sum(0, dtype=torch.float32) / self.slots

    def rows(self) -> Tensor:
        """int64 [L, H]: tokens held by each head."""
        return self.held.sum(2)

    def among(self, tokens: Sequence[int]) -> Tensor:
        """int64 [L, H]: how many of the tokens at these positions each head holds."""
        return self.held[:, :, list(tokens)].sum(2)


def read(session: ChatSession) -> Kept:
    """The present facts of a chat. Between turns only; if nothing was fed, T is 0."""
    spans = spell(session.tokenizer, session.fed)
    parts = filter(None, locate(spans, session.documents))
    return Kept(held(session), spans, tuple(parts))


def held(session: ChatSession) -> Tensor:
    """bool [L, H, T]: whether a head holds the token at position t of `session.fed`."""
    import torch

    shape = session.engine.kv.shape
    found = torch.zeros(shape.layers, shape.kv_heads, len(session.fed), dtype=torch.bool)
    for layer, head in product(range(shape.layers), range(shape.kv_heads)):
        found[layer, head, session.kept(layer, head)] = True
    return found


def spell(tokenizer: Tokenizer, ids: Sequence[int]) -> Spans:
    """The text of `ids`, as from `tokenizer.decode`, and where each token's text is.

    A stream returns no text for a control token, and none yet for the first bytes of a character.
    Decoding the token alone tells these two apart, and whether it ends inside a character.
    """
    alone: dict[int, tuple[bool, bool]] = {}

    def look(id: int) -> tuple[bool, bool]:
        """Whether the token has any text, and whether it ends inside a character."""
        stream = tokenizer.stream()
        said, rest = stream.push(id), stream.flush()
        return bool(said or rest), bool(rest)

    stream = tokenizer.stream()
    pieces: list[str] = []
    token: list[int] = []
    start: list[int] = []
    end: list[int] = []
    length = 0
    for position, id in enumerate(ids):
        piece = stream.push(id)
        if id not in alone:
            alone[id] = look(id)
        has_text, unfinished = alone[id]
        if not piece and not has_text:
            continue
        pieces.append(piece)
        token.append(position)
        start.append(length)
        length += len(piece)
        end.append(length + (unfinished or not piece))
    pieces.append(stream.flush())
    return Spans("".join(pieces), tuple(token), tuple(start), tuple(end))


def locate(spans: Spans, documents: Sequence[Document]) -> list[Part | None]:
    """Where the documents are among the tokens; None for a document whose text the tokenizer
    changes (a normaliser)."""
    parts: list[Part | None] = []
    at = 0
    for number, document in enumerate(documents, 1):
        whole = document.rendered()
        begin = spans.text.find(whole, at)  # with its name: a short text may also be elsewhere
        begin = (
            begin + whole.rfind(document.text) if begin >= 0 else spans.text.find(document.text, at)
        )
        if begin < 0:
            parts.append(None)
            continue
        at = begin + len(document.text)
        pieces = spans.overlap(begin, at)
        first, last = spans.token[pieces[0]], spans.token[pieces[-1]] + 1
        parts.append(Part(document.name or f"document {number}", first, last))
    return parts


def counted(session: ChatSession, most: float = math.inf) -> list[int | None]:
    """The number of tokens of each document, in the order of /docs. For a document that was read,
    those that /kept shows; otherwise those of its text alone, or None if it has more than `most`
    characters."""
    ids = session.fed or session.known
    read = locate(spell(session.tokenizer, ids), session.documents) if ids else []

    def alone(text: str) -> int | None:
        return None if len(text) > most else len(session.tokenizer.encode(text))

    return [
        alone(document.text) if part is None else part.last - part.first
        for document, part in zip_longest([*session.documents, *session.pending], read)
    ]
